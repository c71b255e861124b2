"""Every error that atsc raises on purpose; all of them are one clear line for the user."""


class AtscError(Exception):
    """What was being done, which node or file, expected and found, what to try."""


class UsageError(AtscError):
    """A flag or an argument that makes no sense; the command line exits with 2."""


class ModelError(AtscError):
    """The model file is damaged, or holds something that atsc does not support."""


class UnsupportedError(ModelError):
    """Nodes that are not supported, all of them; the message has a line for each reason."""

    def __init__(self, message: str, nodes: list[dict[str, str | int | None]]) -> None:
        super().__init__(message)
        self.nodes = nodes
        """Each with `node`, `operator` (with its domain), `opset` (None: unknown), `reason`."""


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
