"""Every error that atsc raises on purpose: one clear line for the user, or one for each node."""


class AtscError(Exception):
    """What was being done, which node or file, expected and found, what to try."""


class UsageError(AtscError):
    """A flag or an argument that makes no sense; the command line exits with 2."""


class ModelError(AtscError):
    """The model file is damaged, or holds something that atsc does not support."""


class UnsupportedError(ModelError):
    """Nodes that are not supported, all of them: the first in the first line, then one a line."""

    def __init__(self, model: str, nodes: list[dict[str, str | int | None]]) -> None:
        """`nodes` have `node`, `operator` (with its domain), `opset` (None: unknown), `reason`."""
        first, *others = map(_described, nodes)
        count = f"{len(nodes)} nodes are" if others else "1 node is"
        super().__init__("\n  ".join([f"{model}: {count} not supported: {first}", *others]))
        self.nodes = nodes


def _described(node: dict[str, str | int | None]) -> str:
    operator, opset = str(node["operator"]), node["opset"]
    if opset is not None and operator.endswith(")"):
        operator = f"{operator[:-1]}, opset {opset})"
    return f"{node['node']}: {operator}: {node['reason']}"


class BudgetError(AtscError):
    """The model does not fit the memory that the user allows."""


class CodegenError(AtscError):
    """A kernel could not be generated, compiled or linked."""


class PlanError(AtscError):
    """A plan folder is damaged, incomplete, or made for something else."""


class DeviceError(AtscError):
    """A device is absent, too small, or failed while it ran."""


class CancelledError(AtscError):
    """A session's `cancel` ended the call."""
