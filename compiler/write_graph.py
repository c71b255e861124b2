"""Writing the plan of a general graph: weights, library, manifest and folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from atsc.codegen.graph.build import GraphCode, build_graph_library, crc32_of
from atsc.codegen.graph.tensor import Buffer
from atsc.codegen.package import WEIGHTS, PlanFolder
from atsc.compiler import plan
from atsc.compiler.compilation import CompileOptions
from atsc.compiler.isa import platform_name
from atsc.compiler.tensor_graph import TensorGraph
from atsc.compiler.version import atsc_version
from atsc.compiler.write_plan import LEAST_ISA, LIBRARY, plan_target
from atsc.targets.target import Target


def write_graph(
    graph: TensorGraph, code: GraphCode, options: CompileOptions, target: Target, output: Path
) -> Path:
    """Write the plan folder.

    Raises:
        CodegenError: the tables do not compile or link.
        PlanError: the folder cannot be written.
    """
    with PlanFolder(output) as folder:
        crc32 = crc32_of(code)
        facts = [code.name, crc32, *(path.name for path in code.objects)]
        facts += [str(call.node) for call in code.program.calls]
        plan_id = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        folder.add_file(WEIGHTS, b"".join(code.weights()))
        library = build_graph_library(code, plan_id, crc32, folder.path / f"{LIBRARY}.partial")
        folder.add_file(LIBRARY, library)
        library.unlink()
        folder.add_companions(graph.companion_files)
        return folder.commit(_manifest(graph, code, options, target, plan_id, crc32))


def _manifest(
    graph: TensorGraph,
    code: GraphCode,
    options: CompileOptions,
    target: Target,
    plan_id: str,
    crc32: int,
) -> plan.Manifest:
    program = code.program
    unit = plan.Unit(
        name="constants",
        nodes=tuple(dict.fromkeys(call.node for call in program.calls)),
        format="constants",
        bytes=code.weights_bytes,
        offset=0,
        residency="ram",
        crc32=crc32,
    )
    return plan.Manifest(
        plan_id=plan_id,
        atsc_version=atsc_version(),
        platform=platform_name(),
        isa=LEAST_ISA,
        library=LIBRARY,
        weights=WEIGHTS,
        model=plan.Model(
            name=graph.name,
            vocab_size=1,
            model_context_length=1,
            bos_token_id=None,
            eos_token_ids=(),
            source=tuple(Path(file).name for file in graph.source_files),
        ),
        options=plan.Options(ctx=1, chunk=1, accuracy_level=None, threads=options.threads),
        # Buffers between kernels are as large as the inputs make them.
        memory=plan.Memory(weights_bytes=code.weights_bytes, kv_bytes=0, arena_bytes=0),
        units=(unit,),
        files={},
        target=plan_target(target),
        graph=plan.GraphModel(
            inputs=tuple(map(_tensor, program.inputs)),
            outputs=tuple(map(_tensor, program.outputs)),
            num_kernels=len(code.kernels),
            num_calls=len(program.calls),
        ),
    )


def _tensor(buffer: Buffer) -> plan.GraphTensor:
    return plan.GraphTensor(buffer.name, buffer.dtype, tuple(map(str, buffer.shape)))
