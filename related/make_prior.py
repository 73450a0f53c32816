# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "mujoco==4.0.0",
#     "numpy==2.4.6",
#     "requests==2.34.2",
#     "tyro==1.0.17",
# ]
# ///
"""Ask a language model for 25 actions in every state of a text environment, and store the answers for training.

    python related/make_prior.py --env-id kitchen --print-prompt     # read the first prompt, call nobody
    python related/make_prior.py --env-id kitchen --base-url http://127.0.0.1:8123/v1 --model qwen2.5-coder-1.5b
    python related/make_prior.py --env-id kitchen --synthetic 0.6    # no model: a made-up prior, labelled as one

The file holds one JSON object a line: first the settings, then for each state its text, the prompt, the raw answers and
the actions that they were mapped to. It is called `.partial` until it is complete; the same command goes on with it.
The key, if the endpoint needs one, comes from OPENAI_API_KEY.
"""

import json
import os
import random
import re
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from text_kitchen import text_env, transitions, value_iteration

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the HTTP client is that of generate_policy.py
try:
    import generate_policy as client
except ModuleNotFoundError as error:
    raise SystemExit(f"make_prior.py needs generate_policy.py in the folder above its own: {error}")


@dataclass
class Args:
    env_id: str = "kitchen"
    """environment of text_kitchen.py"""
    base_url: str = "http://127.0.0.1:8123/v1"
    """OpenAI-compatible endpoint; `/v1` and a final slash may be left out"""
    model: str = "default"
    """model name that the endpoint knows; it also names the file"""
    num_answers: int = 25
    """answers stored for each state: the largest `--num-proposals` of the training scripts"""
    temperature: float = 1.0
    """sampling temperature"""
    top_p: float = 1.0
    """probability mass that is sampled from"""
    max_tokens: int = 10
    """tokens of an answer; a longer one is cut, and what is there is mapped"""
    timeout: float = 300.0
    """seconds to wait for a whole answer; raise it for a slow local model"""
    unmatched: Literal["random", "last", "drop"] = "random"
    """an answer that names no admissible action: a uniform draw, the last action of the list, or left out"""
    synthetic: float = 0.0
    """ask nobody: with this probability a uniform draw from the optimal actions, else one from all admissible ones"""
    output: str = ""
    """file to write; empty: `priors/<env_id>__<model>.jsonl` beside this script"""
    print_prompt: bool = False
    """print the first prompt and stop, without a call"""


def build_prompt(task: str, text: str, names: list[str]) -> str:
    """The one message of a request. What all states share comes first, where a server's prompt cache keeps it."""
    return f"{task}\n\n{text}\nPossible actions: {', '.join(names)}.\nAnswer with the next action only."


def plain(text: str) -> str:
    """Lower-case words, without punctuation and articles."""
    return " ".join(word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in ("a", "an", "the"))


def map_answer(answer: str, names: list[str], unmatched: str, rng: random.Random) -> str | None:
    """Return the admissible action that a free answer means, or None if it is to be left out.

    The action whose name occurs most often in the answer, as whole words, cases, punctuation and articles apart; of
    several, the one that is named first. Official code of arXiv 2410.07927: substrings, and the last of the list.
    """
    answer = plain(answer)
    found = [[match.start() for match in re.finditer(rf"\b{plain(name)}\b", answer)] for name in names]
    if any(found):
        return names[min((i for i in range(len(names)) if found[i]), key=lambda i: (-len(found[i]), found[i][0]))]
    if unmatched == "random":
        return rng.choice(names)
    return names[-1] if unmatched == "last" else None


def read_answers(body: str) -> list[str]:
    """The texts of all choices of a completion. Empty and cut ones count: max_tokens is meant to be small."""
    try:
        contents = [choice["message"]["content"] or "" for choice in json.loads(body)["choices"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        contents = []
    if not contents or not all(isinstance(content, str) for content in contents):
        return [client.read_answer(body)]  # says what is wrong with it
    return [client.redact(content) for content in contents]


def ask(prompt: str, args: Args) -> list[str]:
    """Return `num_answers` answers: in one request if the server takes `n`, else one by one."""
    url = client.chat_url(args.base_url)
    payload = {"model": args.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": args.max_tokens}
    payload |= {"temperature": args.temperature, "top_p": args.top_p}
    answers, several = [], True
    while len(answers) < args.num_answers:
        missing = args.num_answers - len(answers)
        try:
            body = client.post(url, payload | ({"n": missing} if several and missing > 1 else {}), args.timeout)
        except client.EndpointError:
            if not several:
                raise
            several = False
            continue
        answers += read_answers(body)
    return answers[: args.num_answers]


def load_partial(path: Path, settings: dict) -> set[str]:
    """Return the texts that an interrupted run has stored; cut off a line that it had begun."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        path.write_bytes(b"".join(lines[:-1]))
        lines.pop()
    if not lines:
        return set()
    stored = json.loads(lines[0])
    changed = [name for name in settings if name != "date" and stored.get(name) != settings[name]]
    if changed:
        raise SystemExit(f"{path}: was begun with another {', '.join(changed)}; finish it with those, or delete it")
    return {json.loads(line)["text"] for line in lines[1:]}


def main(args: Args):
    env, table = text_env(args.env_id), transitions(args.env_id)
    task = env.get_wrapper_attr("task")
    model = f"synthetic, accuracy {args.synthetic:g}" if args.synthetic else args.model
    name = f"synthetic-{args.synthetic:g}" if args.synthetic else re.sub(r"[^\w.-]+", "-", args.model)
    path = Path(args.output or Path(__file__).parent / "priors" / f"{args.env_id}__{name}.jsonl")
    partial = path.with_name(path.name + ".partial")
    if args.print_prompt:
        text, actions = next(iter(table.items()))
        print(build_prompt(task, text, [action[0] for action in actions]))
        return
    if path.exists():
        raise SystemExit(f"{path}: exists and is complete; delete it to ask again")
    if not 0 <= args.synthetic <= 1 or args.num_answers < 1:
        raise SystemExit("--synthetic must be in [0, 1] and --num-answers at least 1")

    settings = {"env_id": args.env_id, "model": model, "num_answers": args.num_answers}
    if not args.synthetic:
        settings |= {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
        settings |= {"unmatched": args.unmatched}
    settings["date"] = str(date.today())
    path.parent.mkdir(parents=True, exist_ok=True)
    done = load_partial(partial, settings) if partial.exists() else set()
    q = value_iteration(table)
    matched = total = 0
    with open(partial, "a", encoding="utf-8") as file:
        if file.tell() == 0:
            file.write(json.dumps(settings) + "\n")
        for number, (text, outcomes) in enumerate(table.items(), 1):
            if text in done:
                continue
            names, rng = [outcome[0] for outcome in outcomes], random.Random(text)
            if args.synthetic:
                best = [name for name, value in zip(names, q[text]) if np.isclose(value, q[text].max())]
                actions = [
                    rng.choice(best if rng.random() < args.synthetic else names) for _ in range(args.num_answers)
                ]
                row = {"text": text, "actions": actions}
            else:
                prompt = build_prompt(task, text, names)
                try:
                    answers = ask(prompt, args)
                except (client.EndpointError, client.Failure) as error:
                    raise SystemExit(f"state {number} of {len(table)}: {error}; run again to go on from {partial}")
                matched += sum(map_answer(answer, names, "drop", rng) is not None for answer in answers)
                total += len(answers)
                actions = [map_answer(answer, names, args.unmatched, rng) for answer in answers]
                actions = [action for action in actions if action is not None]
                row = {"text": text, "prompt": prompt, "answers": answers, "actions": actions}
                print(f"{number}/{len(table)}: {matched / total:.0%} of the answers named an action", flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()
    os.replace(partial, path)
    print(f"wrote {path}: {len(table)} states, {args.num_answers} answers each")


if __name__ == "__main__":
    main(tyro.cli(Args))
