"""A child process that answers requests for kernels: one line in, one line out.

TVM may crash, print, or never end; here it does so without its user. `python -m` starts it.
"""

from __future__ import annotations

import os
import sys
import warnings

from atsc.codegen.tvm_request import Answer, Request
from atsc.compiler.errors import CodegenError


def main() -> None:
    """Answer until standard input ends."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    # What TVM prints goes where messages go.
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(_answer(Request.from_text(line)).to_text() + "\n")
        answers.flush()


def _answer(request: Request) -> Answer:
    from atsc.codegen.tvm_check import check
    from atsc.codegen.tvm_tail import lower

    try:
        answer = lower(request)
        check(request, answer)
    except CodegenError as error:
        return Answer(refusal=str(error))
    except Exception as error:
        # TVM raises what its parts raise: a node that it does not take is not a reason to end.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Answer(refusal=f"TVM: {lines[-1][:200] if lines else type(error).__name__}")
    return answer


if __name__ == "__main__":
    main()
