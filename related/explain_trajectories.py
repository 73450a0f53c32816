# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "requests==2.34.2",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tyro==1.0.17",
# ]
# ///
"""Ask a language model to explain the trajectories that `modulated_ppo.py --dump-trajectories` wrote.

    python related/modulated_ppo.py --explain-episodes 3 --dump-trajectories lake.jsonl
    python related/explain_trajectories.py --trajectories lake.jsonl --print-prompt     # read a prompt, call nobody
    python related/explain_trajectories.py --trajectories lake.jsonl --output lake.json \
        --base-url http://127.0.0.1:8123/v1 --model NAME
    python related/modulated_ppo.py --explanations lake.json

One question an episode: which states are critical, why, which action is better, and how much is it worth? What passes
the checks is stored as `{state, why, action, reward}`, beside the whole answer. The file is replaced after each answer,
and a second call goes on with the episodes that are missing. The client, the lint and the child process are those of
generate_policy.py; the key comes from OPENAI_API_KEY only, and is neither printed nor stored.
"""

import hashlib
import json
import math
import os
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).resolve().parents[1]))  # generate_policy.py lies there
from modulated_ppo import ENV_IDS, KEYS, Task, check_critical, check_predicates
from text_kitchen import text_env

import generate_policy as gp


@dataclass
class Args:
    trajectories: str
    """file of `modulated_ppo.py --dump-trajectories`"""
    output: str = "explanations.json"
    """file to write, or to go on with"""
    base_url: str = "http://127.0.0.1:8123/v1"
    """OpenAI-compatible endpoint; `/v1` and a final slash may be left out"""
    model: str = "default"
    """model name that the endpoint knows, stored as the author of the answers; a local server takes any"""
    temperature: float | None = None
    """sampling temperature; sent only if given, since some models refuse it"""
    max_tokens: int | None = None
    """limit on the tokens of an answer; sent only if given, since some models refuse it"""
    timeout: float = 300.0
    """seconds to wait for a whole answer; raise it for a slow local model"""
    steps: int = 6
    """states of an episode that the model reads: the last different ones"""
    print_prompt: bool = False
    """print the first prompt and stop, without a call"""


# --- The question -----------------------------------------------------------------------------------------------------
ROLE = "You explain the behaviour of an agent that has not learned its task.\n"
LAKE = """
A hole ends the episode. The reward is 1 at the goal and 0 everywhere else.
The actions: left is column - 1, right is column + 1, up is row - 1, down is row + 1.
"""
HOPPER = """
A robot with one leg (torso, thigh, leg, foot) shall hop forward, fast, without falling. Each step pays 1 plus the forward \
speed, minus a small cost of the torques. The episode ends when the robot falls: height obs[0] below 0.7, or torso angle \
obs[1] below -0.2 or above 0.2. One step is 0.008 seconds. An action is three torques from -1 to 1: on the thigh joint, the \
leg joint and the foot joint. obs is an array of 11 numbers, named in the trajectory.
"""
INSTRUCTIONS = """
Do it in steps:
1. Read the trajectory. Why did the agent not get more reward?
2. Choose at most 3 critical states: states in which the action has a large effect on the reward that can still be had.
3. For each say in one short sentence why it is critical, and name the best action there, which may differ from the agent's.
4. Give that action a reward from 0.1 to 1: how much it matters.
"""
LAKE_FORMAT = """
Answer with a JSON list and nothing else. "step" is a step of the trajectory, "action" is left, down, right or up.
The form, with invented values:
[{"step": 3, "why": "Below is ice, and the goal is further down.", "action": "down", "reward": 0.5}]
"""
HOPPER_FORMAT = """
Answer with a JSON list and nothing else. "state" is a Python condition on obs that holds in the critical states and not in \
others, "action" is a list of three torques. The form, with invented values:
[{"state": "obs[1] > 0.1 and obs[7] > 0", "why": "It tips over.", "action": [0.3, -0.2, 0.0], "reward": 0.5}]
"""


def build_prompt(task: Task, episode: dict, steps: int) -> str:
    """Return the question about one episode: its last `steps` different states, each with its last action."""
    last = {step["state"]: step for step in episode["steps"]}
    shown = sorted(last.values(), key=lambda step: step["t"])[-steps:]
    lines = [
        f"Step {s['t']}: {s['state']} -> action {json.dumps(s['action'])}, reward {s['reward']:.3g}" for s in shown
    ]
    end = f"It ended after {len(episode['steps'])} steps ({episode['end']}) with a return of {episode['return']:.3g}."
    about = "\nTask: " + text_env(task.env_id).task + LAKE if task.discrete else HOPPER
    form = LAKE_FORMAT if task.discrete else HOPPER_FORMAT
    return f"{ROLE}{about}{INSTRUCTIONS}{form}\nThe trajectory:\n\n" + "\n".join(lines) + f"\n{end}\n"


# --- The answer -------------------------------------------------------------------------------------------------------
def read_critical(answer: str, task: Task, episode: dict) -> tuple[list[dict], list[str]]:
    """Return the critical states of an answer that pass the checks, and why the others do not.

    A lake's answer names steps; what is stored is the text of the state at that step.
    """
    start, end = answer.find("["), answer.rfind("]")
    try:
        items = json.loads(answer[start : end + 1]) if 0 <= start < end else None
    except (ValueError, RecursionError) as error:
        return [], [f"no JSON list: {gp.one_line(error, 100)}"]
    if not isinstance(items, list):
        return [], ["no JSON list in the answer"]
    states = {step["t"]: step["state"] for step in episode["steps"]}
    critical, refused = [], []
    for item in items:
        try:
            if task.discrete and isinstance(item, dict):
                step = item.pop("step", None)
                if type(step) is not int or step not in states:
                    raise ValueError(f"the trajectory has no step {gp.one_line(step, 20)}")
                item["state"] = states[step]
            check_critical(item, task)
            if not task.discrete:
                if not isinstance(item["state"], str):
                    raise ValueError("state must be an expression of obs")
                check_predicates([item["state"]], task.env_id)
            critical.append({key: item[key] for key in KEYS})
        except (ValueError, gp.Failure) as error:
            refused.append(gp.one_line(error, 200))
    return critical, refused


def read_trajectories(path: Path) -> list[dict]:
    """Return the episodes. SystemExit, in one line, for a file that `--dump-trajectories` did not write."""
    try:
        episodes = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for episode in episodes:
            for step in episode["steps"]:
                step["t"], step["state"], step["action"], step["reward"]
            episode["env_id"], episode["seed"], episode["return"], episode["end"]
    except OSError as error:
        raise SystemExit(f"--trajectories {path}: {error.strerror}; write it with modulated_ppo.py --dump-trajectories")
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"--trajectories {path}: not a file of modulated_ppo.py --dump-trajectories")
    if not episodes:
        raise SystemExit(f"--trajectories {path}: no episode in it")
    return episodes


def start_or_resume(path: Path, head: dict) -> dict:
    """Return what the output file holds, or an empty one. SystemExit if it belongs to other questions."""
    if not path.exists():
        return {**head, "answers": []}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in head if data[key] != head[key]]
        [answer["episode"] for answer in data["answers"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise SystemExit(f"--output {path}: exists, and is no file of explain_trajectories.py; give another name")
    if changed:
        raise SystemExit(f"--output {path}: holds answers with another {', '.join(changed)}; give another name")
    return data


def save(path: Path, data: dict):
    """Write under a temporary name, then rename: a kill at any moment leaves the answers so far."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def main(args: Args):
    for name, least in (("steps", 1), ("max_tokens", 1), ("temperature", 0), ("timeout", 1e-3)):
        value = getattr(args, name)
        if value is not None and not least <= value < math.inf:
            raise SystemExit(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    episodes = read_trajectories(Path(args.trajectories))
    if episodes[0]["env_id"] not in ENV_IDS:
        raise SystemExit(f"--trajectories {args.trajectories}: of an unknown environment")
    task = Task(episodes[0]["env_id"])
    prompts = [build_prompt(task, episode, args.steps) for episode in episodes]
    if args.print_prompt:
        print(prompts[0])
        return
    url, path = gp.chat_url(args.base_url), Path(args.output)
    if not (gp.api_key().isascii() and gp.api_key().isprintable()):
        raise SystemExit("OPENAI_API_KEY holds characters that no HTTP header can carry")
    settings = {"model": args.model, "temperature": args.temperature, "max_tokens": args.max_tokens}
    settings = {key: value for key, value in settings.items() if value is not None}
    digest = hashlib.sha256("".join(prompts).encode()).hexdigest()[:16]
    head = {"env_id": task.env_id, "written_by": gp.one_line(args.model), "prompts_sha256": digest}
    data = start_or_resume(path, head)
    answered = {answer["episode"] for answer in data["answers"]}
    for number, (episode, prompt) in enumerate(zip(episodes, prompts)):
        if number in answered:
            continue
        messages = [{"role": "user", "content": prompt}]
        try:
            answer = gp.read_answer(gp.post(url, {**settings, "messages": messages}, args.timeout))
        except gp.Failure as failure:  # the next answer may be of use, and this one can be asked for again
            print(f"episode {number}: {failure}", flush=True)
            continue
        critical, refused = read_critical(answer, task, episode)
        about = {"episode": number, "seed": episode["seed"], "date": str(date.today())}
        about |= {"critical": critical, "refused": refused, "prompt": prompt, "answer": answer}
        data["answers"].append(about)
        save(path, data)
        reasons = "".join(f"; refused: {reason}" for reason in refused)
        print(f"episode {number}: {len(critical)} critical states{reasons}", flush=True)
    missing = len(episodes) - len(data["answers"])
    if missing:
        raise SystemExit(f"{missing} of {len(episodes)} episodes have no answer; the same command asks for them again")
    total = sum(len(answer["critical"]) for answer in data["answers"])
    print(f"{total} critical states of {len(data['answers'])} episodes are in {path}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except (gp.EndpointError, OSError, UnicodeError) as error:
        raise SystemExit(gp.one_line(error))
    except KeyboardInterrupt:
        raise SystemExit(130)
