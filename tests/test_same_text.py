"""The two scripts repeat each other on purpose. What they share must be the same text."""

import difflib
import inspect
import re

import camel_sac
import camel_td3

OWN = {"Args", "Actor", "train"}


def parts(script):
    return {
        name: inspect.getsource(thing)
        for name, thing in vars(script).items()
        if getattr(thing, "__module__", None) == script.__name__ and name not in OWN
    }


def test_functions_and_classes_are_the_same():
    td3, sac = parts(camel_td3), parts(camel_sac)
    assert len(td3) >= 15 and list(td3) == list(sac)
    for name in td3:
        assert td3[name] == sac[name], f"{name} differs"


def test_settings_that_both_have_are_the_same():
    """Same flag: same type, and the same help unless the algorithms differ in it."""
    td3, sac = (re.split(r'"""\n\s+', inspect.getsource(script.Args)) for script in (camel_td3, camel_sac))
    td3, sac = ({entry.split(":")[0]: entry for entry in entries} for entries in (td3, sac))
    differ = {name for name in td3.keys() & sac.keys() if td3[name] != sac[name]}
    assert differ <= {"mask", "learning_starts", "policy_frequency", "tau"}


def test_loops_differ_only_in_the_update_and_the_networks():
    td3, sac = (inspect.getsource(script.train).splitlines() for script in (camel_td3, camel_sac))
    blocks = difflib.SequenceMatcher(None, td3, sac, autojunk=False).get_matching_blocks()
    shared = sum(block.size for block in blocks)
    assert shared > 0.7 * len(td3)
    # Everything from the evaluation on: progress, checkpoint, model.
    end = [next(i for i, line in enumerate(lines) if "evaluation_due =" in line) for lines in (td3, sac)]
    assert td3[end[0] :] == sac[end[1] :]
    assert td3[: td3.index("    if args.evaluate:")][-6:] == sac[: sac.index("    if args.evaluate:")][-6:]
