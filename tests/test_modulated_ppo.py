"""modulated_ppo.py on the small lake and on Hopper-v4; explain_trajectories.py against a scripted HTTP server."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from test_generate_policy import KEY, answer, completion, no_key, server, silent, waits  # noqa: F401  fixtures among them

sys.path.insert(0, str(ROOT / "related"))  # its scripts import each other as neighbours
import explain_trajectories as explain
import modulated_ppo as m
from text_kitchen import text_env, value_iteration
from torch import nn

LAKE = m.Task("frozen_lake_4x4")
START = next(iter(LAKE.table))
SMALL = {"env_id": "frozen_lake_4x4", "pretrain_steps": 64, "total_timesteps": 64, "num_envs": 2, "num_steps": 16}
SMALL |= {"evaluations": 2, "eval_episodes": 4, "explain_episodes": 4, "hidden": 8}
HOPPER = SMALL | {"env_id": "Hopper-v4", "eval_episodes": 1, "override_fraction": float("inf")}


def optimal(text):
    q = value_iteration(LAKE.table)[text]
    return set(np.flatnonzero(q > q.max() - 1e-9).tolist())


def entry(state=START, action="right", reward=1.0, why="it leads to the goal"):
    return {"state": state, "why": why, "action": action, "reward": reward}


def new_agent(task=LAKE, seed=1):
    torch.manual_seed(seed)
    return m.Agent(task, 8)


def write(entries, env_id="frozen_lake_4x4", name="explanations.json"):
    Path(name).write_text(json.dumps({"env_id": env_id, "answers": [{"episode": 0, "critical": entries}]}))
    return name


@pytest.fixture
def stored(monkeypatch):
    """Of each update: the stored actions, and (number of the environment, observation, action) as executed."""
    record = {"stored": [], "executed": []}
    make_env, log_prob = m.Task.make_env, m.Categorical.log_prob

    def recording_env(task):
        env, number = make_env(task), len(record["envs"])
        step = env.step
        record["envs"].append(env)

        def recording_step(action):
            record["executed"].append((number, env.text, action))
            return step(action)

        env.step = recording_step
        return env

    def recording_log_prob(self, value):
        if value.ndim == 2:  # that of a whole rollout
            record["stored"].append(value.clone())
        return log_prob(self, value)

    record["envs"] = []
    monkeypatch.setattr(m.Task, "make_env", recording_env)
    monkeypatch.setattr(m.Categorical, "log_prob", recording_log_prob)
    return record


# --- The environment in words ----------------------------------------------------------------------------------------


def test_the_table_is_the_environment_in_words():
    table_env, env, rng = LAKE.make_env(), text_env("frozen_lake_4x4"), np.random.default_rng(0)
    assert table_env.reset(seed=0)[0] == env.reset(seed=0)[0]
    ends = set()
    for i in range(1000):
        chances = [0.4, 0.1, 0.1, 0.4] if i < 300 else [0.1, 0.4, 0.4, 0.1]  # from the goal, then towards it
        action = int(rng.choice(4, p=chances))
        ours, theirs = table_env.step(action)[:4], env.step(action)[:4]
        assert ours == theirs
        if ours[2] or ours[3]:
            ends.add((ours[1], ours[2], ours[3]))
            assert table_env.reset()[0] == env.reset()[0]
    assert {(0.0, True, False), (1.0, True, False), (0.0, False, True)} <= ends


# --- Plain PPO ---------------------------------------------------------------------------------------------------------


def plain_ppo(agent, args, updates):
    """PPO without a word of modulation, on the environment in words."""
    torch.manual_seed(args.seed)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    envs = [text_env(args.env_id) for _ in range(args.num_envs)]
    texts = [env.reset()[0] for env in envs]
    inputs = torch.eye(len(LAKE.table))
    number = {text: i for i, text in enumerate(LAKE.table)}
    for _ in range(updates):
        obs, actions, rewards, dones = [], [], [], []
        for _ in range(args.num_steps):
            x = inputs[[number[text] for text in texts]]
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=agent.actor(x)).sample()
            row = []
            for i, env in enumerate(envs):
                texts[i], reward, terminated, truncated, _ = env.step(int(action[i]))
                if truncated and not terminated:
                    with torch.no_grad():
                        reward = np.float32(reward) + args.gamma * agent.critic(inputs[[number[texts[i]]]]).item()
                if terminated or truncated:
                    texts[i] = env.reset()[0]
                row.append((reward, terminated or truncated))
            obs.append(x), actions.append(action)
            rewards.append([r for r, _ in row]), dones.append([float(d) for _, d in row])
        obs, actions = torch.stack(obs), torch.stack(actions)
        rewards, dones = np.array(rewards, np.float32), np.array(dones, np.float32)
        with torch.no_grad():
            old = torch.distributions.Categorical(logits=agent.actor(obs)).log_prob(actions)
            values = agent.critic(obs)[..., 0].numpy()
            last_value = agent.critic(inputs[[number[text] for text in texts]])[:, 0].numpy()
        advantages = np.zeros_like(values)
        for i in range(args.num_envs):  # the sum of discounted errors, up to the end of the episode
            running, next_value = np.float32(0), last_value[i]
            for t in reversed(range(args.num_steps)):
                going_on = 1 - dones[t, i]
                error = rewards[t, i] + args.gamma * going_on * next_value - values[t, i]
                running = error + args.gamma * args.gae_lambda * going_on * running
                advantages[t, i], next_value = running, values[t, i]
        flat = [obs.flatten(0, 1), actions.flatten(), old.flatten()]
        flat += [torch.from_numpy(advantages).flatten(), torch.from_numpy(advantages + values).flatten()]
        for _ in range(args.update_epochs):
            for index in torch.randperm(args.num_steps * args.num_envs).chunk(args.num_minibatches):
                x, a, old_logprob, advantage, target = (part[index] for part in flat)
                policy = torch.distributions.Categorical(logits=agent.actor(x))
                ratio = torch.exp(policy.log_prob(a) - old_logprob)
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                surrogate = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage).mean()
                value_loss = 0.5 * torch.square(agent.critic(x)[:, 0] - target).mean()
                loss = -surrogate - args.ent_coef * policy.entropy().mean() + args.vf_coef * value_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()


def test_none_is_plain_ppo_bit_for_bit():
    args = m.Args(**SMALL | {"variant": "none", "num_steps": 48})  # longer than the lake's 20 steps
    ours, theirs, first = new_agent(), new_agent(), new_agent()
    m.learn(ours, LAKE, args, 3 * 96)
    plain_ppo(theirs, args, 3)
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name]), name
    assert not torch.equal(ours.actor[0].weight, first.actor[0].weight)


@pytest.mark.parametrize("variant", ["A", "R", "RA", "random"])
def test_a_table_that_never_matches_changes_nothing(variant, monkeypatch):
    """Modulation takes no random number from training."""
    plain, modulated = new_agent(), new_agent()
    m.learn(plain, LAKE, m.Args(**SMALL | {"variant": "none"}), 64)
    asked = []
    monkeypatch.setattr(m.Table, "match", lambda _, texts: asked.append(texts) or np.full(len(texts), -1))
    m.learn(modulated, LAKE, m.Args(**SMALL | {"variant": variant}), 64, m.Table([entry()], LAKE, [], 0.5))
    assert len(asked) == 32
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), modulated.parameters()))


# --- Modulation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant, overridden", [("A", True), ("RA", True), ("random", True), ("R", False)])
def test_what_is_executed_is_what_is_stored(stored, variant, overridden):
    table = m.Table([entry(action="down")], LAKE, [], 0.5)
    args = m.Args(**SMALL | {"variant": variant, "override_fraction": float("inf")})
    shares = []
    m.learn(new_agent(), LAKE, args, 64, table, lambda *event: shares.append(event[2]["modulation/overridden"]))
    executed = torch.tensor([action for _, _, action in stored["executed"]]).view(2, 16, 2)
    assert len(stored["stored"]) == 2 and torch.equal(executed, torch.stack(stored["stored"]))
    at_start = [action for _, text, action in stored["executed"] if text == START]
    elsewhere = [action for _, text, action in stored["executed"] if text != START]
    assert (set(at_start) == {1}) == overridden and len(set(elsewhere)) > 1
    assert sum(shares) / 2 == (len(at_start) / 64 if overridden else 0.0)


def test_the_chance_of_an_override_falls_to_nothing():
    table = m.Table([entry(state) for state in LAKE.table], LAKE, [], 0.5)  # every state is critical
    args, shares = m.Args(**SMALL | {"variant": "A", "override_fraction": 0.5}), []
    m.learn(new_agent(), LAKE, args, 8 * 32, table, lambda *event: shares.append(event[2]["modulation/overridden"]))
    assert shares[0] == 1.0 and 0.5 < shares[1] < 1 and 0 < shares[3] < 0.5 and shares[4:] == [0.0] * 4


@pytest.mark.parametrize("visits, payments", [("first", 4), ("every", 80)])
def test_the_implicit_reward_is_paid_once_for_each_state_and_episode(visits, payments):
    """`left` in the first corner goes nowhere: two environments spend two episodes of 20 steps there."""
    table = m.Table([entry(action="left", reward=0.5)], LAKE, [], 0.5)
    settings = {"variant": "RA", "override_fraction": float("inf"), "num_steps": 40, "reward_visits": visits}
    paid = []
    args = m.Args(**SMALL | settings, reward_coef=0.1)
    m.learn(new_agent(), LAKE, args, 80, table, lambda *event: paid.append(event[2]["modulation/implicit_reward"]))
    assert paid == [pytest.approx(payments * 0.1 * 0.5 / 80)]


def test_another_action_loses_what_the_suggested_one_gains():
    table = m.Table([entry(action="down", reward=0.5)], LAKE, [], 0.5)
    assert table.reward(0, 1) == 0.5 and table.reward(0, 2) == -0.5


def test_the_implicit_reward_reaches_the_learner_only_with_r():
    table, agents = m.Table([entry(action="left")], LAKE, [], 0.5), {}
    for variant in ("A", "RA"):
        agents[variant] = new_agent()
        args = m.Args(**SMALL | {"variant": variant, "override_fraction": float("inf")})
        m.learn(agents[variant], LAKE, args, 32, table)
    assert not torch.equal(agents["A"].critic[4].bias, agents["RA"].critic[4].bias)


@pytest.mark.parametrize("variant", ["none", "A", "R", "RA", "random"])
def test_evaluation_uses_neither_table_nor_implicit_reward(variant, monkeypatch):
    evaluating, evaluations, evaluate, match = [False], [], m.evaluate, m.Table.match

    def watched_evaluate(*arguments):
        evaluating[0] = True
        before = torch.get_rng_state()
        returns = evaluate(*arguments)
        assert torch.equal(before, torch.get_rng_state()), "it draws from a generator of its own"
        evaluating[0] = False
        evaluations.append(returns)
        return returns

    def watched_match(*arguments):
        assert not evaluating[0]
        return match(*arguments)

    monkeypatch.setattr(m, "evaluate", watched_evaluate)
    monkeypatch.setattr(m.Table, "match", watched_match)
    rows = m.train(m.Args(**SMALL, variant=variant, reward_coef=100.0))
    assert [row["step"] for row in rows] == [0, 32, 64] and len(evaluations) == 3
    assert set(np.concatenate(evaluations).tolist()) <= {0.0, 1.0}
    (run_dir,) = Path("runs").iterdir()
    saved = {name: torch.load(run_dir / f"{name}.pt")["agent"]["actor.0.weight"] for name in ("suboptimal", "model")}
    assert not torch.equal(saved["suboptimal"], saved["model"])
    assert (run_dir / "progress.csv").read_text().count("\n") == 4


def test_good_advice_solves_the_lake():
    settings = {"env_id": "frozen_lake_4x4", "pretrain_steps": 1024, "total_timesteps": 6144, "learning_rate": 2e-3}
    settings |= {"evaluations": 1, "hidden": 32}
    first, last = (row["return_mean"] for row in m.train(m.Args(**settings, variant="RA")))
    assert first < 0.2 and last > 0.6


def test_an_agent_can_be_loaded_and_refined_again():
    first = m.train(m.Args(**SMALL, variant="A"))
    (run_dir,) = Path("runs").iterdir()
    assert m.train(m.Args(**SMALL, variant="A", agent=str(run_dir / "suboptimal.pt"))) == first
    with pytest.raises(SystemExit, match="no agent for these settings"):
        m.train(m.Args(**SMALL | {"hidden": 16}, agent=str(run_dir / "suboptimal.pt")))


# --- Explanations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accuracy", [1.0, 0.8, 0.6, 0.0])
def test_the_synthetic_explainer_is_as_right_as_told(accuracy):
    episodes = m.roll_out(new_agent(), LAKE, 20, 0, sample=True)
    entries = m.synthetic_explanations(LAKE, episodes, accuracy, 0.99, np.random.default_rng(0))
    right = [LAKE.action_names(e["state"]).index(e["action"]) in optimal(e["state"]) for e in entries]
    assert len(right) > 4 and abs(sum(right) - accuracy * len(right)) <= 0.5
    assert len({e["state"] for e in entries}) == len(entries)
    mistakes = {text for e in episodes for text, action, _ in e["steps"] if action not in optimal(text)}
    assert {e["state"] for e in entries} <= mistakes
    for e in entries:
        m.check_critical(e, LAKE)


def test_the_random_control_has_as_many_states_and_the_same_rewards():
    episodes = m.roll_out(new_agent(), LAKE, 20, 0, sample=True)
    entries = m.random_explanations(LAKE, episodes, np.array([0.25, 0.5, 1.0]), np.random.default_rng(0))
    assert [e["reward"] for e in entries] == [0.25, 0.5, 1.0] and len({e["state"] for e in entries}) == 3
    for e in entries:
        m.check_critical(e, LAKE)


def test_several_explanations_of_a_state_are_one():
    entries = [entry(action="up", reward=1.0), entry(action="down", reward=0.2), entry(action="down", reward=0.4)]
    table = m.Table(entries, LAKE, [], 0.5)
    assert table.actions.tolist() == [1] and table.rewards == pytest.approx([0.3])
    assert table.match([START, list(LAKE.table)[1]]).tolist() == [0, -1]


def test_a_sound_file_is_read():
    assert m.read_explanations(Path(write([entry()])), LAKE) == [entry()]


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "must hold env_id"),
        ('{"env_id": "frozen_lake_4x4"}', "must hold env_id"),
        ('{"env_id": "Hopper-v4", "answers": []}', "made for Hopper-v4"),
        ([], "no critical state"),
        ([7], "exactly state, why, action, reward"),
        ([{"state": START}], "exactly state, why, action, reward"),
        ([entry() | {"t": 3}], "exactly state, why, action, reward"),
        ([entry(state="row 1")], "critical state 1: state must be a text"),
        ([entry(), entry(action="jump")], "critical state 2: action must be one of left, down, right, up"),
        ([entry(reward=2)], "reward a number"),
        ([entry(reward=True)], "reward a number"),
        ([entry(reward=float("nan"))], "reward a number"),
        ([entry(why=None)], "why must be a text"),
    ],
)
def test_a_malformed_file_gets_one_line(content, words):
    if isinstance(content, list):
        write(content)
    elif content is not None:
        Path("explanations.json").write_text(content)
    with pytest.raises(SystemExit, match=words) as error:
        m.train(m.Args(**SMALL, explanations="explanations.json"))
    assert str(error.value).startswith("--explanations explanations.json: ") and "\n" not in str(error.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"accuracy": 1.5}, "--accuracy 1.5: must be at most 1"),
        ({"num_steps": 0}, "--num-steps 0: must be above 0"),
        ({"reward_coef": float("inf")}, "must be finite"),
        ({"evaluations": 50}, "there are only 2 updates"),
        ({"agent": "missing.pt"}, "--agent missing.pt"),
        ({"num_minibatches": 20}, "each needs two steps"),
        ({"env_id": "Hopper-v4"}, "the optimum of Hopper-v4 is not known"),
    ],
)
def test_bad_settings_get_one_line(settings, words):
    with pytest.raises(SystemExit, match=words) as error:
        m.train(m.Args(**SMALL | settings))
    assert "\n" not in str(error.value) and not Path("runs").exists()


# --- Hopper-v4 ---------------------------------------------------------------------------------------------------------


def test_hopper_is_modulated_by_expressions_and_by_neighbours():
    """The first is true until the torso falls below 1.1; its code runs in the child process."""
    rule = {"state": "np.abs(obs[1]) < 5 and obs[0] > 1.1", "why": "upright", "action": [0.5, -0.5, 0.25], "reward": 1}
    rows = m.train(m.Args(**HOPPER, variant="RA", explanations=write([rule], "Hopper-v4")))
    assert rows[1]["overridden"] > 0.5 and rows[1]["implicit_reward"] > 0 and rows[1]["critical_states"] == 1
    rows = m.train(m.Args(**HOPPER, variant="random", explanations="explanations.json", match_radius=1.0))
    assert 0 < rows[1]["overridden"] < 1


def test_matching_of_continuous_states():
    hopper = m.Task("Hopper-v4")
    episodes = [{"steps": [(np.full(11, value), None, 0.0) for value in (-1.0, 1.0)]}]  # standard deviation 1
    entries = [
        {"state": state, "why": "", "action": [0.1, 0.2, 0.3], "reward": 1.0} for state in ([0.0] * 11, [2.0] * 11)
    ]
    entries.append({"state": "obs[0] > 1.9", "why": "", "action": [1.0, 1.0, 1.0], "reward": 0.5})
    table = m.Table(entries, hopper, episodes, radius=0.5)
    queries = [np.full(11, value) for value in (0.4, 0.6, 1.6, 2.0)]
    assert table.match(queries).tolist() == [0, -1, 1, 2], "the expression comes before the neighbours"
    table.close()
    # rho for the same action, 0 for one half the range chances in every dimension; the environment would clip to 1.
    assert table.reward(2, np.ones(3)) == 0.5 and table.reward(2, np.full(3, 9.0)) == 0.5
    assert table.reward(2, np.zeros(3)) == 0.0 and table.reward(2, -np.ones(3)) == -0.5


@pytest.mark.parametrize(
    "state, words",
    [
        ("__import__('os').system('true')", "not about obs alone"),
        ("obs[0] > 1 and __import__('os').system('true')", ".system is not on the list"),
        ("obs[0] > 1), exit(", "not a Python expression"),
        ("open(obs)", "open is not allowed"),
        ("step > 3 and obs[0] > 1", "not about obs alone"),
        ("obs[11] > 0", "IndexError"),
        ("obs > 0", "ambiguous"),
    ],
)
def test_code_in_a_file_passes_the_lint_and_the_child_or_is_refused(state, words):
    bad = {"state": state, "why": "", "action": [0, 0, 0], "reward": 0}
    with pytest.raises(SystemExit, match="--explanations explanations.json") as error:
        m.read_explanations(Path(write([bad], "Hopper-v4")), m.Task("Hopper-v4"))
    assert words in str(error.value) and "\n" not in str(error.value)


# --- explain_trajectories.py -------------------------------------------------------------------------------------------


@pytest.fixture
def trajectories():
    m.train(m.Args(**SMALL | {"explain_episodes": 2}, dump_trajectories="lake.jsonl"))
    return [json.loads(line) for line in Path("lake.jsonl").read_text().splitlines()]


def ask(server, **settings):  # noqa: F811
    explain.main(
        explain.Args("lake.jsonl", **{"output": "out.json", "base_url": server.url, "model": "qwen", **settings})
    )
    return json.loads(Path("out.json").read_text())


def listed(*items):
    return completion("Here it is:\n```json\n" + json.dumps(items) + "\n```")


def test_dumped_trajectories_are_in_words(trajectories):
    assert len(trajectories) == 2 and not Path("runs").exists()
    for episode in trajectories:
        assert episode["env_id"] == "frozen_lake_4x4" and episode["steps"][0]["state"] == START
        assert episode["end"] in ("terminated", "time limit")
        assert episode["return"] == sum(step["reward"] for step in episode["steps"])
        for t, step in enumerate(episode["steps"]):
            assert step["t"] == t and step["action"] in LAKE.action_names(step["state"])


def test_answers_are_stored_and_used(trajectories, server, capsys):  # noqa: F811
    good = {"step": 0, "why": "The goal is to the right.", "action": "right", "reward": 0.5}
    bad = [{**good, "step": 99}, {**good, "action": "jump"}, {**good, "reward": "high"}, {"step": 0}, 7]
    server.replies = [listed(good, *bad), completion("I do not know.")]
    data = ask(server, temperature=0.2)
    first, second = data["answers"]
    assert first["critical"] == [entry(why=good["why"], reward=0.5)] and len(first["refused"]) == 5
    assert second["critical"] == [] and second["refused"] == ["no JSON list in the answer"]
    assert data["env_id"] == "frozen_lake_4x4" and data["written_by"] == "qwen"
    (path, _, payload), _ = server.requests
    assert path == "/v1/chat/completions" and payload["model"] == "qwen" and payload["temperature"] == 0.2
    prompt = payload["messages"][0]["content"]
    assert prompt == first["prompt"] and START in prompt and text_env("frozen_lake_4x4").task in prompt
    assert "1 critical states" in capsys.readouterr().out
    rows = m.train(m.Args(**SMALL, explanations="out.json"))
    assert rows[1]["overridden"] > 0 and rows[1]["critical_states"] == 1


def test_a_stopped_call_goes_on(trajectories, server, monkeypatch):  # noqa: F811
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    good = {"step": 0, "why": KEY, "action": "right", "reward": 0.5}
    server.replies = [listed(good), answer(401, {"error": {"message": f"bad key {KEY}"}})]
    with pytest.raises(explain.gp.EndpointError, match="answered 401") as error:
        ask(server)
    assert KEY not in str(error.value)
    first = json.loads(Path("out.json").read_text())["answers"]
    assert [row["episode"] for row in first] == [0]
    server.replies = [listed(good)]
    assert ask(server)["answers"][0] == first[0] and len(server.requests) == 3
    assert ask(server)["answers"][1]["episode"] == 1 and len(server.requests) == 3, "nothing is missing"
    assert KEY not in Path("out.json").read_text()
    assert server.requests[0][1]["Authorization"] == f"Bearer {KEY}"
    with pytest.raises(SystemExit, match="holds answers with another written_by"):
        ask(server, model="other")


def test_an_answer_that_does_not_come_is_asked_for_again(trajectories, server, monkeypatch):  # noqa: F811
    monkeypatch.setattr(explain.gp, "CONNECT_SECONDS", 0.5)
    good = {"step": 0, "why": "", "action": "right", "reward": 0.5}
    server.replies = [silent, listed(good)]
    with pytest.raises(SystemExit, match="1 of 2 episodes have no answer"):
        ask(server, timeout=0.5)
    assert [row["episode"] for row in json.loads(Path("out.json").read_text())["answers"]] == [1]
    assert [row["episode"] for row in ask(server)["answers"]] == [1, 0]


@pytest.mark.parametrize(
    "content, words",
    [(None, "No such file"), ("", "no episode"), ("{}\n", "not a file of"), ("text", "not a file of")],
)
def test_bad_trajectories_get_one_line(content, words):
    if content is not None:
        Path("lake.jsonl").write_text(content)
    with pytest.raises(SystemExit, match=f"--trajectories lake.jsonl: .*{words}"):
        explain.main(explain.Args("lake.jsonl"))


def test_a_foreign_output_file_is_left_alone(trajectories, server):  # noqa: F811
    Path("out.json").write_text("my notes")
    with pytest.raises(SystemExit, match="is no file of explain_trajectories.py"):
        ask(server)
    assert Path("out.json").read_text() == "my notes"


def test_hopper_answers_are_expressions_that_were_tried():
    hopper = m.Task("Hopper-v4")
    good = {"state": "obs[1] > 0.1 and obs[7] > 0", "why": "It tips.", "action": [0.3, -0.2, 0.0], "reward": 0.5}
    bad = [{**good, "state": "obs[1] >"}, {**good, "state": "open('x')"}, {**good, "action": [2, 0, 0]}]
    bad.append({**good, "state": [0.0] * 11})
    critical, refused = explain.read_critical(json.dumps([good, *bad]), hopper, {"steps": []})
    assert critical == [good] and len(refused) == 4
    prompt = explain.build_prompt(hopper, hopper_episode(hopper), 6)
    assert "torso angle obs[1] = 0.00" in prompt and prompt.count("Step ") == 2


def hopper_episode(hopper):
    steps = [(np.zeros(11), np.zeros(3), 1.0), (np.full(11, 0.5), np.ones(3), 1.0)]
    words = [{"t": t, **hopper.words(obs, action), "reward": reward} for t, (obs, action, reward) in enumerate(steps)]
    return {"steps": words, "end": "terminated", "return": 2.0}


# --- The shipped answers, and the commands -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "related/explanations").glob("*.json")), ids=lambda path: path.name)
def test_shipped_explanations_are_sound(path):
    data = json.loads(path.read_text())
    assert m.read_explanations(path, m.Task(data["env_id"])) and data["written_by"]
    assert all(row["answer"] and row["prompt"] for row in data["answers"])


def test_command_lines(run):
    done = run("related/modulated_ppo.py", "--explanations", "missing.json")
    assert done.returncode == 1 and done.stderr.startswith("--explanations missing.json: No such file")
    assert done.stderr.count("\n") == 1
    done = run("related/explain_trajectories.py", "--help")
    assert done.returncode == 0 and "--print-prompt" in done.stdout and done.stderr == ""
