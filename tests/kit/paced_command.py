"""The real command, with a model that is paced.

    python -m tests.kit.paced_command SECONDS ARGUMENTS...

Each batch of training takes that many seconds longer, as a GPU would take for a larger model: so two cores
carry four peers. A peer that starts itself again is paced again.
"""

import functools
import os
import sys
import time

if __name__ == "__main__":
    from transformers import LlamaForCausalLM

    from trahiv_cli.__main__ import main

    pace_s = float(sys.argv.pop(1))
    forward = LlamaForCausalLM.forward

    @functools.wraps(forward)  # a Trainer looks at its parameters
    def paced(model, *arguments, **keywords):
        if model.training:
            time.sleep(pace_s)
        return forward(model, *arguments, **keywords)

    def begin_again(python, words):
        if words[2] == "trahiv_cli":  # or else it is this command, without the invitation that was typed
            words = [python, "-m", "tests.kit.paced_command", f"{pace_s}", *words[3:]]
        execv(python, words)

    LlamaForCausalLM.forward = paced
    execv = os.execv
    os.execv = begin_again
    main()
