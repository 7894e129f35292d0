"""The real command, with a model that is paced.

    python -m tests.kit.paced_command SECONDS ARGUMENTS...

Each batch of training takes that many seconds longer, as a GPU would take for a larger model: so two cores
carry four peers.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any


def become_paced(pace_s: float) -> None:
    """Have each training batch of a Llama take longer."""
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)  # a Trainer looks at its parameters
    def paced(model: Any, *arguments: Any, **keywords: Any) -> Any:
        if model.training:
            time.sleep(pace_s)
        return forward(model, *arguments, **keywords)

    LlamaForCausalLM.forward = paced


if __name__ == "__main__":
    from trahiv_cli.__main__ import main

    become_paced(float(sys.argv.pop(1)))
    main()
