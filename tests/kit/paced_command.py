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

if __name__ == "__main__":
    from transformers import LlamaForCausalLM

    from trahiv_cli.__main__ import main

    pace_s, forward = float(sys.argv.pop(1)), LlamaForCausalLM.forward

    @functools.wraps(forward)  # a Trainer looks at its parameters
    def paced(model: Any, *arguments: Any, **keywords: Any) -> Any:
        if model.training:
            time.sleep(pace_s)
        return forward(model, *arguments, **keywords)

    LlamaForCausalLM.forward = paced
    main()
