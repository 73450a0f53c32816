"""related/: the text environments, make_prior.py against a scripted HTTP server, and the three learners."""

import json
import math
import random
import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from conftest import ROOT
from gymnasium.utils.env_checker import check_env

sys.path.insert(
    0, str(ROOT / "related")
)  # its scripts import text_kitchen as a neighbour, so that the folder can be copied
import cql_prior
import dqn_prior
import make_prior
import ppo_prior
from text_kitchen import HORIZON, Kitchen, play, text_env, transitions, value_iteration

LEARNERS = {"dqn": dqn_prior, "cql": cql_prior, "ppo": ppo_prior}
SHORT = {
    "dqn": {"episodes": 10, "gradient_steps": 5, "eval_frequency": 5, "eval_episodes": 2},
    "cql": {"dataset_size": 100, "gradient_steps": 20, "eval_frequency": 10},
    "ppo": {"total_timesteps": 128, "num_envs": 2, "num_steps": 32, "eval_frequency": 64, "eval_episodes": 2},
}
TABLES = {name: transitions(name) for name in HORIZON}


def train(learner, **settings):
    module = LEARNERS[learner]
    return module.train(module.Args(**{"env_id": "frozen_lake_4x4", **SHORT[learner], **settings}))


def write_prior(path, env_id, actions_of, num_answers):
    """A file of answers; actions_of(text, names) gives those of a state, or None to leave it out."""
    rows = [{"env_id": env_id, "model": "test", "num_answers": num_answers}]
    for text, outcomes in TABLES[env_id].items():
        if (actions := actions_of(text, [outcome[0] for outcome in outcomes])) is not None:
            rows.append({"text": text, "actions": actions})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# --- Environments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, optimum", [("frozen_lake_8x8", 1.0), ("frozen_lake_4x4", 1.0), ("kitchen", 1.385)])
def test_optimum(name, optimum):
    """The kitchen: two chopped ingredients, one salad, 7 steps for each ingredient and one to serve."""
    table = TABLES[name]
    of_horizon = value_iteration(table, gamma=1.0, sweeps=HORIZON[name])[next(iter(table))].max()
    q = value_iteration(table)
    assert of_horizon == pytest.approx(optimum, abs=1e-9)
    assert play(text_env(name), lambda text: q[text].argmax(), seed=0) == pytest.approx(optimum, abs=1e-9)


@pytest.mark.parametrize("name, steps", [("frozen_lake_8x8", 14), ("frozen_lake_4x4", 6)])
def test_value_of_the_shortest_path(name, steps):
    q = value_iteration(TABLES[name], gamma=0.9)
    assert q[next(iter(q))].max() == pytest.approx(0.9 ** (steps - 1), abs=1e-9)


@pytest.mark.parametrize("name", HORIZON)
def test_words_say_all(name):
    """Names of a state are distinct, texts fit the space, and the encoder tells all texts apart."""
    env = text_env(name)
    for text, outcomes in TABLES[name].items():
        assert len({plain for plain, *_ in outcomes}) == env.action_space.n and env.observation_space.contains(text)
    features = {tuple(dqn_prior.encode(text, 256).tolist()) for text in TABLES[name]}
    assert len(features) == len(TABLES[name])


def test_frozen_lake_text():
    text = next(iter(TABLES["frozen_lake_4x4"]))
    assert "row 1, column 1 of" in text and "row 4, column 4: 3 down and 3 to the right" in text
    assert "left: the edge, down: ice, right: ice, up: the edge" in text


def test_kitchen_pays_each_sub_task_once():
    """Whatever is done for ten episodes, 0.2 comes at most twice an episode and 1 only at its end."""
    check_env(Kitchen(), skip_render_check=True)
    env, rng, chops = text_env("kitchen"), np.random.default_rng(0), 0
    for seed in range(10):
        env.reset(seed=seed)
        done, rewards = False, []
        while not done:
            _, reward, terminated, truncated, _ = env.step(rng.integers(7))
            rewards.append(reward)
            done = terminated or truncated
        chops += sum(abs(reward - 0.199) < 1e-9 for reward in rewards)
        assert sum(reward > 0.1 for reward in rewards[:-1]) <= 2 and len(rewards) <= 50
    assert chops > 0


def test_unknown_environment():
    with pytest.raises(SystemExit, match="kitchen"):
        text_env("pantry")


# --- Mapping answers -------------------------------------------------------------------------------------------------

SIDES = ["left", "down", "right", "up"]
ROOM = ["pick up the tomato", "walk to the cutting board", "chop nothing"]


@pytest.mark.parametrize(
    "answer, names, action",
    [
        ("right", SIDES, "right"),
        (" Right.\n", SIDES, "right"),
        ("**DOWN**", SIDES, "down"),
        ("right or down", SIDES, "right"),  # one each: the one named first
        ("down, not right. down!", SIDES, "down"),  # the most often named
        ("the upper field is bright", SIDES, None),  # whole words
        ("", SIDES, None),
        ("Pick up tomato", ROOM, "pick up the tomato"),  # articles apart
        ("I would walk to the cutting board", ROOM, "walk to the cutting board"),
        ("chop the onion", ROOM, None),
    ],
)
def test_mapping(answer, names, action):
    assert make_prior.map_answer(answer, names, "drop", random.Random(0)) == action
    if action is None:
        assert make_prior.map_answer(answer, names, "last", random.Random(0)) == names[-1]
        drawn = {make_prior.map_answer(answer, names, "random", random.Random(seed)) for seed in range(50)}
        assert drawn == set(names)
    else:
        assert make_prior.map_answer(answer, names, "random", random.Random(0)) == action


FILES = sorted((ROOT / "related" / "priors").glob("*.jsonl"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_stored_answers(path):
    """Every state is there with 25 actions, and those follow from the raw answers by the rule."""
    header, *rows = map(json.loads, path.read_text().splitlines())
    table = TABLES[header["env_id"]]
    assert [row["text"] for row in rows] == list(table) and path.name.startswith(header["env_id"] + "__")
    for row in rows:
        names, rng = [outcome[0] for outcome in table[row["text"]]], random.Random(row["text"])
        assert len(row["actions"]) == 25 and set(row["actions"]) <= set(names)
        if header["model"].startswith("synthetic"):
            assert "answers" not in row
        else:
            assert row["actions"] == [make_prior.map_answer(a, names, header["unmatched"], rng) for a in row["answers"]]
            assert row["text"] in row["prompt"] and all(name in row["prompt"] for name in names)


def test_synthetic_prior_is_as_accurate_as_it_says(tmp_path):
    """0.6 of the draws are optimal, and of the others those that hit an optimal action by chance."""
    path = tmp_path / "synthetic.jsonl"
    settings = {"env_id": "frozen_lake_8x8", "synthetic": 0.6, "num_answers": 200, "output": str(path)}
    make_prior.main(make_prior.Args(**settings))
    table = TABLES["frozen_lake_8x8"]
    q = value_iteration(table)
    found, expected = [], []
    for row in list(map(json.loads, path.read_text().splitlines()))[1:]:
        values = q[row["text"]]
        best = {o[0] for o, value in zip(table[row["text"]], values) if np.isclose(value, values.max())}
        found.append(np.mean([action in best for action in row["actions"]]))
        expected.append(0.6 + 0.4 * len(best) / 4)
    assert np.mean(found) == pytest.approx(np.mean(expected), abs=0.02)


# --- make_prior.py against a server ----------------------------------------------------------------------------------

KEY = "sk-secret-0123456789abcdef"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(payload)
        status, body = self.server.reply(payload)
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def choices(*contents):
    return 200, {"choices": [{"message": {"content": content}, "finish_reason": "length"} for content in contents]}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.url = [], f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server, path, **settings):
    settings = {"env_id": "frozen_lake_4x4", "num_answers": 3, "base_url": server.url, "model": "m", **settings}
    make_prior.main(make_prior.Args(**settings, output=str(path)))
    return list(map(json.loads, path.read_text().splitlines()))


def test_several_answers_a_request(server, tmp_path):
    server.reply = lambda payload: choices(*[f"Right. {KEY}", "down", None][: payload["n"]])
    header, *rows = ask(server, tmp_path / "a.jsonl")
    assert [request["n"] for request in server.requests] == [3] * 11  # once a distinct text
    assert header["model"] == "m" and (header["temperature"], header["max_tokens"]) == (1.0, 10)
    assert [row["text"] for row in rows] == list(TABLES["frozen_lake_4x4"])
    assert rows[0]["actions"][:2] == ["right", "down"] and rows[0]["actions"][2] in SIDES
    assert rows[0]["answers"] == ["Right. <key>", "down", ""] and KEY not in (tmp_path / "a.jsonl").read_text()
    assert not list(tmp_path.glob("*.partial"))


def test_server_that_refuses_n(server, tmp_path):
    server.reply = lambda payload: (400, {"error": "n"}) if "n" in payload else choices("up")
    _, *rows = ask(server, tmp_path / "a.jsonl")
    assert rows[0]["actions"] == ["up"] * 3 and sum("n" not in request for request in server.requests) == 33


def test_server_that_ignores_n(server, tmp_path):
    server.reply = lambda payload: choices("up")
    _, *rows = ask(server, tmp_path / "a.jsonl")
    assert rows[0]["actions"] == ["up"] * 3 and len(server.requests) == 33


def test_resumes_after_an_interruption(server, tmp_path):
    path, partial = tmp_path / "a.jsonl", tmp_path / "a.jsonl.partial"
    server.reply = lambda payload: choices("up", "up", "up") if len(server.requests) <= 4 else (401, {"error": "no"})
    with pytest.raises(SystemExit, match="state 5 of 11: .*401.*OPENAI_API_KEY.*go on from"):
        ask(server, path)
    assert not path.exists() and len(partial.read_text().splitlines()) == 5
    partial.write_bytes(partial.read_bytes() + b'{"text": "torn')
    with pytest.raises(SystemExit, match="another temperature"):
        ask(server, path, temperature=0.5)
    server.requests.clear()
    server.reply = lambda payload: choices("down", "down", "down")
    _, *rows = ask(server, path)
    assert [row["actions"][0] for row in rows] == ["up"] * 4 + ["down"] * 7 and len(server.requests) == 7
    assert [row["text"] for row in rows] == list(TABLES["frozen_lake_4x4"])
    with pytest.raises(SystemExit, match="complete"):
        ask(server, path)


def test_dropped_answers(server, tmp_path):
    server.reply = lambda payload: choices("up", "hm", "")
    _, *rows = ask(server, tmp_path / "a.jsonl", unmatched="drop")
    assert rows[0]["actions"] == ["up"] and len(rows[0]["answers"]) == 3


@pytest.mark.parametrize("body", [{"error": "overloaded"}, {"choices": []}, [1]])
def test_useless_answer(server, tmp_path, body):
    server.reply = lambda payload: (200, body)
    with pytest.raises(SystemExit, match="state 1 of 11"):
        ask(server, tmp_path / "a.jsonl")


# --- The prior in the learners ---------------------------------------------------------------------------------------


def test_shared_text():
    """What the three scripts share is the same text, so that each can be read alone."""
    pattern = r"# --- The prior, the text encoder.*?(?=\n# ---)"
    parts = {
        re.search(pattern, (ROOT / "related" / f"{name}_prior.py").read_text(), re.DOTALL).group() for name in LEARNERS
    }
    assert len(parts) == 1


def test_candidates_count_repeats(tmp_path):
    write_prior(tmp_path / "p.jsonl", "frozen_lake_4x4", lambda *_: ["up", "up", "left", "up"], 4)
    for text in TABLES["frozen_lake_4x4"]:
        assert dqn_prior.load_prior(tmp_path / "p.jsonl", 4, 0)(text, SIDES).tolist() == [1, 0, 0, 3]
    draws = [dqn_prior.load_prior(tmp_path / "p.jsonl", 2, seed)(text, SIDES).tolist() for seed in range(40)]
    assert {tuple(draw) for draw in draws} == {(1, 0, 0, 1), (0, 0, 0, 2)}
    with pytest.raises(SystemExit, match="from 1 to 4"):
        dqn_prior.load_prior(tmp_path / "p.jsonl", 5, 0)
    with pytest.raises(SystemExit, match="'up' is not admissible"):
        dqn_prior.load_prior(tmp_path / "p.jsonl", 4, 0)(text, ["left"])


@pytest.mark.parametrize("learner", LEARNERS)
def test_missing_state_is_named(learner, tmp_path):
    start = next(iter(TABLES["frozen_lake_4x4"]))
    path = write_prior(tmp_path / "p.jsonl", "frozen_lake_4x4", lambda text, names: None if text == start else names, 4)
    with pytest.raises(SystemExit, match="no answer for the state .*row 1, column 1 of"):
        train(learner, prior_file=path, num_proposals=4)


@pytest.mark.parametrize("learner", LEARNERS)
@pytest.mark.parametrize("content", [None, "", "no json", '{"num_answers": 3}\n{"text": "a"}\n'])
def test_no_such_prior(learner, content, tmp_path):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match="p.jsonl"):
        train(learner, prior_file=str(path))


@pytest.mark.parametrize(
    "learner, settings", [("dqn", {"exploration": "posterior"}), ("dqn", {"exploration": "epsilon"}), ("cql", {})]
)
def test_all_actions_once_is_the_plain_method(learner, settings, tmp_path):
    """Bit for bit: evaluations and weights."""
    path = write_prior(tmp_path / "p.jsonl", "kitchen", lambda text, names: names, 7)
    plain, network = train(learner, env_id="kitchen", prior="none", **settings)
    prior, network_2 = train(learner, env_id="kitchen", prior_file=path, num_proposals=7, **settings)
    assert plain == prior and same(network, network_2)
    torch.manual_seed(1)
    assert not same(network, dqn_prior.make_network(7))  # trained at all


def test_no_kl_is_plain_ppo(tmp_path):
    plain, actor = train("ppo", prior="none")
    without, actor_2 = train("ppo", kl_coef=0.0)
    _, actor_3 = train("ppo")
    assert plain == without and same(actor, actor_2) and not same(actor, actor_3)


@pytest.mark.parametrize("learner", ["dqn", "cql"])
@pytest.mark.parametrize("k, actions", [(1, 1), (5, 2)])
def test_one_candidate_is_the_prior_alone(learner, k, actions, tmp_path):
    """Whatever was learned, with one candidate its action is taken: the return is known. With two it is not."""
    q = value_iteration(TABLES["kitchen"])

    def proposed(text, names):
        return [names[i] for i in q[text].argsort()[::-1][:actions]] * (5 if actions == 1 else 3)

    path = write_prior(tmp_path / "p.jsonl", "kitchen", proposed, 5)
    evaluations, network = train(learner, env_id="kitchen", prior_file=path, num_proposals=k)
    torch.manual_seed(1)
    assert not same(network, dqn_prior.make_network(7))
    optimal = [value == pytest.approx(1.385) for _, value in evaluations]
    assert all(optimal) if actions == 1 else not all(optimal)


@pytest.mark.parametrize("module", [dqn_prior, cql_prior])
def test_best_candidate(module):
    values, counts = torch.tensor([[1.0, 5.0, 3.0], [-2.0, -1.0, -3.0]]), torch.tensor([[2.0, 0, 1], [1, 0, 1]])
    assert module.best_candidate(values, counts).tolist() == [3.0, -2.0]
    assert module.best_candidate(values, torch.ones(2, 3)).tolist() == [5.0, -1.0]


def test_conservative_penalty():
    """log(exp 1 + exp 3) - 5 for the data's action 1, which is no candidate. Repeats do not count."""
    values, counts = torch.tensor([[1.0, 5.0, 3.0]]), torch.tensor([[2.0, 0.0, 1.0]])
    penalty = cql_prior.conservative_penalty(values, counts, torch.tensor([1]))
    assert penalty.item() == pytest.approx(math.log(math.e + math.e**3) - 5, abs=1e-6)


def test_kl_and_its_gradient():
    """pi = (1/2, 1/4, 1/4), prior = (1/4, 1/4, 1/2): KL = log(2)/4; dKL/dlogit_i = pi_i (log(pi_i / prior_i) - KL)."""
    pi, prior = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    logits = (pi.log() + 7).requires_grad_()
    kl = ppo_prior.kl_to_prior(logits, prior)
    kl.backward()
    assert kl.item() == pytest.approx(math.log(2) / 4, abs=1e-6)
    log2 = math.log(2)
    hand = [0.5 * (log2 - log2 / 4), 0.25 * (0 - log2 / 4), 0.25 * (-log2 - log2 / 4)]
    assert logits.grad.tolist() == pytest.approx(hand, abs=1e-6)
    assert ppo_prior.kl_to_prior(prior.log(), prior).item() == pytest.approx(0, abs=1e-6)


def test_smoothed_prior():
    counts = torch.tensor([[3.0, 0.0, 2.0]])
    assert ppo_prior.smoothed(counts, 0.01).tolist()[0] == pytest.approx([3.01 / 5.03, 0.01 / 5.03, 2.01 / 5.03])


def test_posterior_exploration_weighs_repeats(tmp_path):
    """An untrained network and temperature infinity: actions come as often as they were proposed."""
    path = write_prior(tmp_path / "p.jsonl", "kitchen", lambda text, names: [names[3]] * 3 + [names[6]], 4)
    seen = []

    class Counting(dqn_prior.ReplayBuffer):
        def add(self, *values):
            seen.append(values[1])
            super().add(*values)

    original, dqn_prior.ReplayBuffer = dqn_prior.ReplayBuffer, Counting
    try:
        train("dqn", env_id="kitchen", prior_file=path, num_proposals=4, inverse_temperature=0.0, episodes=20)
    finally:
        dqn_prior.ReplayBuffer = original
    assert set(seen) == {3, 6} and seen.count(3) / len(seen) == pytest.approx(0.75, abs=0.06)  # 1000 draws


@pytest.mark.parametrize("learner", LEARNERS)
def test_training_opens_no_socket(learner, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    train(learner)


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_seed_repeats(learner):
    (a, network_a), (b, network_b), (_, network_c) = (train(learner, seed=seed) for seed in (3, 3, 4))
    assert a == b and same(network_a, network_b) and not same(network_a, network_c)


@pytest.mark.parametrize(
    "learner, settings",
    [
        ("dqn", {"episodes": 100, "gradient_steps": 40, "eval_frequency": 50, "inverse_temperature": 30.0}),
        ("cql", {"dataset_size": 400, "gradient_steps": 600, "eval_frequency": 600}),
        ("ppo", {"total_timesteps": 8192, "num_envs": 8, "num_steps": 64, "eval_frequency": 4096}),
    ],
)
def test_learns_the_small_lake(learner, settings, tmp_path):
    """From answers of which most are optimal, to a return of more than 0.8 (the uniform policy: 0.012)."""
    q = value_iteration(TABLES["frozen_lake_4x4"])

    def proposed(text, names):
        return [names[q[text].argmax()]] * 4 + ["up", "left", "down"]

    path = write_prior(tmp_path / "p.jsonl", "frozen_lake_4x4", proposed, 7)
    evaluations, _ = train(learner, prior_file=path, num_proposals=7, **settings)
    assert evaluations[-1][1] > 0.8
