"""What both scripts promise: episode boundaries, spaces, reproducibility, saving and resuming, faulty input."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import camel_sac
import camel_td3
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, newest_run, same_weights, trained

SCRIPTS = [camel_td3, camel_sac]


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.__name__)
def camel(request):
    return request.param


@pytest.fixture
def spies(camel, monkeypatch):
    """The environments and buffers that `train` makes, in that order."""
    made = {"envs": [], "buffers": []}
    make_env, buffer_init = camel.make_env, camel.ReplayBuffer.__init__

    def spying_make_env(env_id):
        made["envs"].append(make_env(env_id))
        return made["envs"][-1]

    def spying_init(self, *arguments):
        made["buffers"].append(self)
        buffer_init(self, *arguments)

    monkeypatch.setattr(camel, "make_env", spying_make_env)
    monkeypatch.setattr(camel.ReplayBuffer, "__init__", spying_init)
    return made


def stored(buffer):
    """The columns of a buffer's rows: obs, action, reward, next_obs, terminated, prior, next_prior."""
    return [part.numpy() for part in buffer.rows[: len(buffer)].split(buffer.sizes, 1)]


# --- Episode boundaries


def test_no_transition_crosses_a_reset(camel, spies, small):
    camel.train(camel.Args(env_id="tiny_envs:Count-v0", mask=False, **small))
    obs, _, _, next_obs, terminated, _, _ = stored(spies["buffers"][0])
    expected, episode = [], 0
    while len(expected) < small["total_timesteps"]:
        length = 5 if episode % 2 else 7
        expected += [(episode, step, step + 1, float(episode % 2 == 1 and step == 4)) for step in range(length)]
        episode += 1
    expected = np.array(expected[: small["total_timesteps"]])
    assert np.array_equal(obs, expected[:, :2])
    assert np.array_equal(next_obs, expected[:, [0, 2]])  # the true last observation, not the reset's
    assert np.array_equal(terminated[:, 0], expected[:, 3])  # a time limit is not terminal


def test_half_cheetah_never_terminates(camel, spies):
    camel.train(
        camel.Args(env_id="HalfCheetah-v4", mask=False, total_timesteps=1100, learning_starts=1080, eval_episodes=1)
    )
    assert stored(spies["buffers"][0])[4].sum() == 0


def test_episode_length_is_the_environments(camel, spies, write_policy, small):
    policy = write_policy("HopperFor50-v0", "return np.zeros(3) if step < 51 else None")
    camel.train(camel.Args(env_id="tiny_envs:HopperFor50-v0", policy_file=policy, **small))
    obs, _, _, next_obs, terminated, _, _ = stored(spies["buffers"][0])
    assert not np.array_equal(obs[50], next_obs[49]) and not terminated[49]
    assert all(np.array_equal(obs[i + 1], next_obs[i]) for i in range(49))


# --- Masking inside the loop


@pytest.mark.parametrize("masking", ["step", "episode", "anneal"])
@pytest.mark.parametrize("mapping", ["project", "affine"])
def test_executed_actions_are_stored_and_inside_their_box(camel, spies, write_policy, small, masking, mapping):
    policy = write_policy("Count-v0", "return np.array([0.9 * np.sin(step), 0.5, obs[1] / 7])")
    settings = dict(
        epsilon_masking=masking, mask_mapping=mapping, mask_width=0.1, epsilon_fraction=1.0, epsilon_schedule="linear"
    )
    # epsilon stays 1 throughout, so that the box is known
    camel.train(
        camel.Args(env_id="tiny_envs:Count-v0", policy_file=policy, **settings, **small | {"total_timesteps": 160})
    )
    obs, action, _, next_obs, terminated, prior, next_prior = stored(spies["buffers"][0])
    assert np.array_equal(action, spies["envs"][0].unwrapped.executed)
    for at, stored_prior in ((obs, prior), (next_obs, next_prior)):
        assert np.allclose(
            stored_prior, np.stack([0.9 * np.sin(at[:, 1]), 0.5 + 0 * at[:, 1], at[:, 1] / 7], 1), atol=1e-6
        )
    warm_up = slice(0, small["learning_starts"])
    excess = np.abs(action - prior) - 0.1 * np.array([1.0, 0.5, 0.5])
    assert excess[warm_up].max() <= 1e-6
    assert excess[warm_up].max() > -0.01  # the warm-up uses the whole box


def test_draws_of_the_mask_are_not_those_of_the_actions(camel, spies, write_policy, small):
    warm_up = dict(epsilon_start=0.5, total_timesteps=401, learning_starts=400)
    policy = write_policy("Match-v0", "return 0 * obs")
    camel.train(camel.Args(env_id="Match-v0", policy_file=policy, mask_width=0.01, **small | warm_up))
    action = stored(spies["buffers"][0])[1]
    free = action[np.abs(action) > 0.02]
    assert 150 < len(free) < 250
    assert 0.4 < (free > 0).mean() < 0.6  # equal draws would leave only the upper half to the free actions


@pytest.mark.parametrize("env_id, act_dim", [("tiny_envs:Count-v0", 3), ("Humanoid-v4", 17)])
@pytest.mark.parametrize("masking", ["step", "anneal"])
def test_target_actions_are_inside_their_box(camel, targets, write_policy, env_id, act_dim, masking):
    policy = write_policy(env_id.split(":")[-1], f"return 0.4 * np.sin(np.arange({act_dim}) + step)")
    settings = dict(total_timesteps=130, learning_starts=100, eval_episodes=1, epsilon_masking=masking)
    camel.train(camel.Args(env_id=env_id, policy_file=policy, **settings))
    assert len(targets) == 30
    for box_low, box_high, masked, action in targets:
        assert action.shape == (256, act_dim)
        assert (box_low <= action).all() and (action <= box_high).all()
        assert (box_low <= masked).all() and (masked <= box_high).all()


def test_target_is_masked_by_draws_and_the_actors_loss_in_full_until_its_box_opens(camel, write_policy, monkeypatch):
    action_box, strengths = camel.action_box, []

    def spying_box(prior, strength, *arguments):
        if prior.ndim == 2:  # an update's
            strengths.append(strength)
        return action_box(prior, strength, *arguments)

    monkeypatch.setattr(camel, "action_box", spying_box)
    settings = dict(total_timesteps=140, learning_starts=100, epsilon_fraction=0.5, epsilon_schedule="linear")
    settings |= dict(policy_file=write_policy("Match-v0", "return obs"), policy_frequency=1, eval_episodes=1)
    camel.train(camel.Args(env_id="tiny_envs:Match-v0", **settings))
    in_target, in_loss = strengths[::2], strengths[1::2]
    assert in_loss == pytest.approx([1.0] * 19 + [0.5] + [0.0] * 20)
    assert in_loss[:18] == [1.0] * 18 and in_loss[20:] == [0.0] * 20
    means = np.array([strength.mean().item() for strength in in_target])
    assert all(strength.shape == (256, 1) for strength in in_target)
    assert np.abs(means[:20] - np.arange(20, 0, -1) / 20).max() < 0.16  # five standard errors
    assert (means[20:] == 0).all()


def test_humanoid_actions_stay_in_their_box(camel, spies, write_policy):
    policy = write_policy("Humanoid-v4", "return 0.4 * np.sin(np.arange(17) + step)")
    settings = dict(total_timesteps=130, learning_starts=100, batch_size=32, eval_episodes=1)
    camel.train(camel.Args(env_id="Humanoid-v4", policy_file=policy, mask_width=0.5, **settings))
    _, action, _, _, _, prior, _ = stored(spies["buffers"][0])
    excess = np.abs(action - prior) - 0.5 * 0.4
    assert excess[:100].max() <= 1e-6 and excess[:100].max() > -0.02
    assert np.abs(action).max() <= np.float32(0.4)


def test_policy_is_called_once_a_step_and_once_a_reset(camel, small, write_policy, monkeypatch):
    calls, load_policy = [], camel.load_policy

    def counting_load(path, env):
        policy = load_policy(path, env)
        return lambda obs, step: calls.append(step) or policy(obs, step)

    monkeypatch.setattr(camel, "load_policy", counting_load)
    monkeypatch.setattr(camel, "evaluate", lambda env, policy, episodes: np.zeros(episodes))
    camel.train(camel.Args(env_id="Match-v0", policy_file=write_policy("Match-v0", "return obs"), **small))
    assert calls == list(range(11)) * 20 + [0]  # 200 steps in episodes of 10


# --- Spaces, numerics, memory


def test_unbounded_actions_are_refused(camel):
    with pytest.raises(SystemExit, match="action bounds must be finite"):
        camel.train(camel.Args(env_id="tiny_envs:Unbounded-v0", mask=False))


@pytest.mark.parametrize(
    "env_id, why", [("CartPole-v1", "one-dimensional Box"), ("Nope-v1", "Nope"), ("Pusher-v4", "mujoco")]
)
def test_unfit_environments_are_refused(camel, env_id, why):
    with pytest.raises(SystemExit) as error:
        camel.train(camel.Args(env_id=env_id, mask=False))
    assert why in str(error.value) and env_id in str(error.value) and "\n" not in str(error.value)
    assert not Path("runs").exists()


def test_buffer_is_float32_capped_and_announced(camel, spies, small, capsys):
    camel.train(camel.Args(env_id="Match-v0", mask=False, **small))
    (buffer,), env = spies["buffers"], spies["envs"][0]
    assert buffer.rows.dtype == torch.float32 and buffer.rows.shape == (200, 1 + 1 + 1 + 1 + 1)
    assert "200 transitions" in capsys.readouterr().out
    assert env.observation_space.dtype == np.float64  # the environment's own space is left alone


def test_buffer_wraps_and_samples_every_row(camel):
    buffer = camel.ReplayBuffer(4, 1, 1, 1, torch.device("cpu"))
    for i in range(6):
        buffer.add(np.array([i]), np.array([i + 0.1]), i + 0.2, np.array([i + 0.3]), i % 2 == 0, [i + 0.5], [i + 0.6])
    assert len(buffer) == 4 and sorted(buffer.rows[:, 0].tolist()) == [2, 3, 4, 5]
    obs, action, reward, next_obs, terminated, prior, next_prior = buffer.sample(1000, torch.Generator().manual_seed(0))
    assert set(obs[:, 0].tolist()) == {2, 3, 4, 5}
    for offset, part in ((0.1, action), (0.2, reward), (0.3, next_obs), (0.5, prior), (0.6, next_prior)):
        assert torch.allclose(part, obs + offset)
    assert torch.equal(terminated, (obs % 2 == 0).float())


# --- Reproducibility, saving, resuming


def test_two_runs_are_identical_and_seeds_matter(camel, write_policy, small):
    settings = dict(env_id="Match-v0", policy_file=write_policy("Match-v0", "return obs"), **small)
    first, second, other = (trained(camel, **settings, seed=seed) for seed in (3, 3, 4))
    assert same_weights(first, second) and not same_weights(first, other)


def test_evaluation_does_not_change_training(camel, write_policy, small):
    settings = dict(env_id="Match-v0", policy_file=write_policy("Match-v0", "return obs"), **small)
    often = trained(camel, **settings | {"eval_frequency": 20, "eval_episodes": 3})
    assert same_weights(often, trained(camel, **settings | {"eval_frequency": 0}))


def test_training_changes_weights(camel, small):
    settings = dict(env_id="Match-v0", mask=False, **small)
    before = trained(camel, **settings | {"total_timesteps": 121})  # one critic update, no actor update
    after = trained(camel, **settings)
    for part in ("actor", "qf"):
        assert any(not torch.equal(before[part][name], after[part][name]) for name in after[part])


def test_loaded_model_scores_the_same_in_a_new_process(camel, run, write_policy, small):
    camel.train(camel.Args(env_id="Hopper-v4", policy_file=write_policy("Hopper-v4", "return np.zeros(3)"), **small))
    run_dir = newest_run()
    last = list(csv.DictReader(open(run_dir / "progress.csv")))[-1]
    done = run(f"{camel.__name__}.py", "--evaluate", run_dir.absolute() / "model.pt")
    assert done.returncode == 0, done.stderr
    assert f"return {float(last['return_mean']):.1f} +- {float(last['return_std']):.1f}" in done.stdout


@pytest.mark.parametrize("masking", ["step", "episode", "anneal"])
@pytest.mark.parametrize("schedule", ["linear", "adaptive"])
def test_resumed_run_equals_undisturbed_run(camel, write_policy, keep_checkpoint, masking, schedule):
    """The environment is Hopper: episodes of varying length, and resets that draw from the environment's generator."""
    keep_checkpoint(camel, lambda contents: contents["step"] > 200)
    settings = dict(total_timesteps=330, learning_starts=150, batch_size=32, eval_episodes=1, eval_frequency=110)
    settings |= dict(policy_file=write_policy("Hopper-v4", "return np.zeros(3)"), mask_width=0.3)
    settings |= dict(epsilon_masking=masking, epsilon_schedule=schedule, checkpoint_frequency=20)
    whole = trained(camel, **settings)
    whole_rows = list(csv.DictReader(open(newest_run() / "progress.csv")))
    assert 200 < torch.load("kept/checkpoint.pt")["step"] < 330
    camel.train(camel.Args(**settings, resume="kept/checkpoint.pt"))
    assert same_weights(whole, torch.load("kept/model.pt"))
    rows = list(csv.DictReader(open("kept/progress.csv")))
    for row in rows + whole_rows:
        row.pop("steps_per_second")
    assert rows == whole_rows and [row["step"] for row in rows] == ["110", "220", "330"]


def test_a_finished_run_can_be_extended(camel, small):
    """N steps, resume, N steps equals 2N steps."""
    settings = dict(env_id="Hopper-v4", mask=False, **small) | {"checkpoint_frequency": 1}
    whole = trained(camel, **settings | {"total_timesteps": 400})
    trained(camel, **settings)
    checkpoint = str(newest_run() / "checkpoint.pt")
    camel.train(camel.Args(**settings | {"total_timesteps": 400}, resume=checkpoint))
    assert same_weights(whole, torch.load(newest_run() / "model.pt"))


def test_killed_run_resumes_to_the_same_weights(camel, write_policy):
    script = ROOT / f"{camel.__name__}.py"
    flags = ["--env-id", "tiny_envs:Match-v0", "--policy-file", write_policy("Match-v0", "return obs")]
    flags += "--total-timesteps 900 --learning-starts 200 --checkpoint-frequency 50 --eval-frequency 300".split()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}

    def start(*more):
        return subprocess.Popen(
            [sys.executable, str(script), *flags, *more], env=environment, stdout=subprocess.DEVNULL
        )

    assert start().wait() == 0
    whole = torch.load(newest_run() / "model.pt")
    shutil.rmtree("runs")
    process = start()
    deadline = time.time() + 120
    while time.time() < deadline:
        time.sleep(0.05)
        checkpoints = list(Path("runs").glob("*/checkpoint.pt"))
        if checkpoints and torch.load(checkpoints[0])["step"] >= 400:
            break
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    run_dir = newest_run()
    assert not (run_dir / "model.pt").exists()  # nothing that looks finished
    assert torch.load(run_dir / "checkpoint.pt")["step"] >= 400
    resume = subprocess.run([sys.executable, str(script), "--resume", str(run_dir / "checkpoint.pt")], env=environment)
    assert resume.returncode == 0 and same_weights(whole, torch.load(run_dir / "model.pt"))


@pytest.mark.parametrize(
    "change, why",
    [
        ({"gamma": 0.9}, "another gamma"),
        ({"total_timesteps": 130}, "no steps left to train"),
        ({"seed": 9}, "another seed"),
    ],
)
def test_resume_refuses_other_settings(camel, small, change, why):
    settings = dict(env_id="Match-v0", mask=False, **small) | {"checkpoint_frequency": 10}
    camel.train(camel.Args(**settings))
    with pytest.raises(SystemExit, match=why):
        camel.train(camel.Args(**settings | change, resume=str(newest_run() / "checkpoint.pt")))


def test_resume_and_evaluate_refuse_other_files(camel, small):
    camel.train(camel.Args(env_id="Match-v0", mask=False, **small))
    model = str(newest_run() / "model.pt")
    Path("text.pt").write_text("no model")
    torch.save({"script": "another"}, "another.pt")
    with pytest.raises(SystemExit, match="cannot be resumed"):
        camel.train(camel.Args(env_id="Match-v0", mask=False, **small, resume=model))
    for path in ("missing.pt", "text.pt", "another.pt"):
        with pytest.raises(SystemExit, match=path):
            camel.train(camel.Args(env_id="Match-v0", evaluate=path))


def test_what_a_run_leaves(camel, write_policy, small):
    policy = write_policy("Match-v0", "return obs")
    camel.train(camel.Args(env_id="Match-v0", policy_file=policy, epsilon_schedule="linear", **small))
    run_dir = newest_run()
    assert re.fullmatch(rf"Match-v0__{camel.__name__}__1__\d+-\d+-\d+", run_dir.name)
    config = json.loads((run_dir / "config.json").read_text())
    assert config["policy_file"] == policy and config["torch"] == torch.__version__
    rows = list(csv.DictReader(open(run_dir / "progress.csv")))
    columns = ["step", "return_mean", "return_std", "training_return", "epsilon", "steps_per_second"]
    assert [*rows[0]] == columns and [row["step"] for row in rows] == ["100", "200"]
    assert all(math.isfinite(float(row[column])) for row in rows for column in columns)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir)).Reload()
    tags = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "eval/return_mean", "eval/return_std"}
    tags |= {"eval/prior_return", "camel/epsilon", "camel/mask_strength", "camel/box_width"}
    assert tags <= set(events.Tags()["scalars"])
    assert events.Scalars("eval/prior_return")[0].value == pytest.approx(10.0)
    # During the warm-up the box is +-0.1 half ranges around a prior anywhere in the space.
    assert 0.05 <= events.Scalars("camel/box_width")[0].value <= 0.1
    assert events.Scalars("camel/epsilon")[-1].value < 0.1


# --- Policy files


@pytest.mark.parametrize(
    "text, why",
    [
        ("ENV_ID = 'Match-v0'\n", "defines no function policy"),
        ("ENV_ID = 'Match-v0'\npolicy = 3\n", "defines no function policy"),
        ("def policy(obs, step): return obs\n", "made for ENV_ID = None"),
        ("ENV_ID = 'Match-v1'\ndef policy(obs, step): return obs\n", "made for ENV_ID = 'Match-v1'.*'Match-v0'"),
        ("ENV_ID = 'Match-v0'\ndef policy(obs, step) return obs\n", "cannot be loaded: SyntaxError"),
        ("import nonsense_package\n", "cannot be loaded: ModuleNotFoundError"),
        ("import sys\nsys.exit(0)\n", "cannot be loaded: SystemExit"),
    ],
)
def test_files_that_are_refused(camel, text, why):
    Path("faulty.py").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=f"faulty.py: .*{why}") as error:
        camel.train(camel.Args(env_id="Match-v0", policy_file="faulty.py"))
    assert "\n" not in str(error.value) and not Path("runs").exists()


@pytest.mark.parametrize(
    "body",
    [
        "return None",
        "return 0.5",
        "return np.zeros(2)",
        "return np.zeros((1, 1))",
        "return ['1']",
        "return 'text'",
        "return [[1], [1, 2]]",
        "return {}",
        "return [True]",
        "return [np.nan]",
        "return [np.inf]",
        "return [1j]",
        "return 1 / 0",
        "return obs[7]",
        "return undefined",
        "raise SystemExit",
    ],
)
@pytest.mark.parametrize("at", [0, 3])
def test_answers_that_are_refused(camel, write_policy, body, at):
    policy = write_policy("Match-v0", f"if step < {at}: return obs\n    {body}")
    with pytest.raises(SystemExit, match=rf"policy.py: policy\(\) .*step {at}") as error:
        camel.train(camel.Args(env_id="Match-v0", policy_file=policy))
    assert "\n" not in str(error.value) and not Path("runs").exists()


def test_a_fault_at_the_last_observation_shows_before_there_is_a_run(camel, write_policy, small):
    policy = write_policy("Match-v0", "return obs / (step < 10)")  # an episode has 10 steps
    with np.errstate(divide="ignore"), pytest.raises(SystemExit, match="finite numbers; at step 10"):
        camel.train(camel.Args(env_id="Match-v0", policy_file=policy, **small))
    assert not Path("runs").exists()


def test_a_late_fault_leaves_nothing_that_looks_finished(camel, write_policy, small):
    policy = write_policy(
        "Match-v0", "policy.calls = getattr(policy, 'calls', 0) + 1\n    return obs / (policy.calls < 150)"
    )
    with np.errstate(divide="ignore"), pytest.raises(SystemExit, match="finite numbers; at step"):
        camel.train(camel.Args(env_id="Match-v0", policy_file=policy, **small))
    assert not (newest_run() / "model.pt").exists()


def test_answers_that_are_accepted(camel, write_policy):
    env = camel.make_env("Count-v0")
    for body, expected in [
        ("return [5, -5, 0.25]", [1, 0, 0.25]),  # torques saturate
        ("return (0, 1, 0)", [0, 1, 0]),
        ("return np.array([1e300, 0.5, 0.5])", [1, 0.5, 0.5]),
        ("obs[:] = 7; return np.zeros(3)", [0, 0, 0]),
    ]:
        obs = np.ones(2)
        prior = camel.load_policy(Path(write_policy("Count-v0", body)), env)(obs, 0)
        assert prior.dtype == np.float32 and np.array_equal(prior, np.array(expected, np.float32))
        assert np.array_equal(obs, np.ones(2))


def test_missing_policy_file(camel):
    for settings in ({"env_id": "Match-v0"}, {"policy_file": "nowhere.py"}):
        with pytest.raises(SystemExit, match="no such policy file"):
            camel.train(camel.Args(**settings))


def test_expert_masking(camel, small):
    """A trained model, of either script, is a prior; it proposes what its own deterministic policy does."""
    for maker in SCRIPTS:
        model = trained(maker, env_id="Hopper-v4", mask=False, **small)
        path = newest_run() / "model.pt"
        env = camel.make_env("Hopper-v4")
        actor = maker.Actor(11, torch.from_numpy(env.action_space.low), torch.from_numpy(env.action_space.high))
        actor.load_state_dict(model["actor"])
        prior = camel.load_policy(path, env)
        for _ in range(20):
            obs = np.random.default_rng(0).normal(size=11)
            expected = actor(torch.from_numpy(obs).float()).detach().numpy()
            assert np.allclose(prior(obs, 0), expected, atol=1e-5)
        after = trained(camel, env_id="Hopper-v4", policy_file=str(path), **small)
        assert not same_weights(after, model) if maker is camel else True
        with pytest.raises(SystemExit, match="Hopper-v4.*Walker2d-v4"):
            camel.train(camel.Args(env_id="Walker2d-v4", policy_file=str(path)))


# --- Command line, packages, files


def test_help_without_warnings(camel, run):
    done = run(f"{camel.__name__}.py", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "--epsilon-masking {step,episode,anneal}" in done.stdout and "25e3" not in done.stdout


@pytest.mark.parametrize(
    "flags, why",
    [
        ("--mask-width 0", "--mask-width 0.0: must be above 0"),
        ("--epsilon-start 2", "--epsilon-start 2.0: must be at most 1"),
        ("--total-timesteps 100", "--learning-starts .*: must be below --total-timesteps"),
        ("--policy-frequency 0", "--policy-frequency 0: must be above 0"),
        ("--eval-frequency -1", "--eval-frequency -1: must be 0 or more"),
        ("--resume nowhere.pt", "nowhere.pt: "),
        ("--evaluate nowhere.pt", "nowhere.pt: "),
        ("--policy-file nowhere.py", "nowhere.py: no such policy file"),
    ],
)
def test_faulty_flags_get_one_line(camel, run, flags, why):
    done = run(f"{camel.__name__}.py", *flags.split())
    assert done.returncode == 1 and re.match(why, done.stderr) and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_absent_device(camel):
    with pytest.raises(SystemExit, match="--device cuda: torch finds none here"):
        camel.train(camel.Args(device="cuda"))


def test_each_script_runs_alone(camel, run, tmp_path):
    """The script and one policy, copied into an empty folder, train; nothing warns."""
    for source in (f"{camel.__name__}.py", "llm_policies/hopper_v4.py"):
        shutil.copy(ROOT / source, tmp_path)
    flags = "--policy-file hopper_v4.py --total-timesteps 200 --learning-starts 100 --eval-episodes 1".split()
    done = run(tmp_path / f"{camel.__name__}.py", *flags)
    assert done.returncode == 0 and done.stderr == "" and (newest_run() / "model.pt").exists()


def test_script_metadata_equals_requirements(camel):
    text = (ROOT / f"{camel.__name__}.py").read_text(encoding="utf-8")
    block = re.match(r"# /// script\n(.*?)# ///\n", text, re.DOTALL).group(1)
    assert re.findall(r'^#     "(.*)",$', block, re.MULTILINE) == (ROOT / "requirements.txt").read_text().split()


def test_defaults_build_every_environment_with_a_policy():
    for path in (ROOT / "llm_policies").glob("*_v4.py"):
        env_id = re.search(r'^ENV_ID = "(.*)"', path.read_text(encoding="utf-8"), re.MULTILINE).group(1)
        env = camel_td3.make_env(env_id)
        assert camel_td3.default_policy_file(env_id) == path
        prior = camel_td3.load_policy(path, env)
        obs, _ = env.reset(seed=0)
        assert env.action_space.contains(prior(obs, 0)) and isinstance(env, gym.Wrapper)
