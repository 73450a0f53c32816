"""Measure environment steps per second of camel_td3.py and camel_sac.py beside Stable-Baselines3 and SBX.

    pip install -r benchmark/requirements-speed.txt
    python benchmark/speed.py

It needs Linux and two idle cores, takes under 20 minutes, writes benchmark/results/speed.csv when all is measured, and
prints the rates, their share of the arithmetic limit and the ratios. docs/speed.md explains what is compared.
"""

import csv
import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import gymnasium as gym

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results" / "speed.csv"
ENV_ID, OBS_DIM, ACT_DIM = "Hopper-v4", 11, 3
BATCH_SIZE, HIDDEN = 256, 256
WARM_UP = 1000  # steps without updates
FIRST = WARM_UP + 100  # timing begins here: XLA has compiled, torch has allocated
LAST = FIRST + 1000
REPETITIONS = 3
THREADS = (1, 2)
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
CONTESTANTS = ["camel_td3", "camel_td3 --no-mask", "SB3 TD3", "SBX TD3"]
CONTESTANTS += ["camel_sac", "camel_sac --no-mask", "SB3 SAC", "SBX SAC"]
PACKAGES = ["torch", "gymnasium", "mujoco", "numpy", "stable-baselines3", "sbx-rl", "jax", "jaxlib", "flax"]


# --- One measurement, in a process of its own ------------------------------------------------------------------------
class Stopwatch(gym.Wrapper):
    """Note the time at the beginning of step FIRST and of step LAST: whole rounds of the training loop lie between."""

    steps, times = 0, ()

    def step(self, action):
        self.steps += 1
        if self.steps in (FIRST, LAST):
            self.times += (time.perf_counter(),)
        return self.env.step(action)


def time_script(name: str, threads: int) -> Stopwatch:
    """Run one of our scripts as its command line would. Its evaluations lie before FIRST and after LAST."""
    sys.path.insert(0, str(ROOT))
    script_name, *flags = name.split()
    script = importlib.import_module(script_name)
    make_env, made = script.make_env, []

    def make_timed_env(env_id: str) -> Stopwatch:
        made.append(Stopwatch(make_env(env_id)))
        return made[-1]

    script.make_env = make_timed_env
    steps = dict(total_timesteps=LAST, learning_starts=WARM_UP, eval_frequency=0, eval_episodes=1)
    steps |= dict(batch_size=BATCH_SIZE, policy_frequency=2)
    script.train(script.Args(env_id=ENV_ID, mask=not flags, device="cpu", torch_threads=threads, **steps))
    return made[0]  # the second is for evaluations


def time_peer(name: str, threads: int) -> Stopwatch:
    """Train with Stable-Baselines3 or SBX at our scripts' sizes and update ratios, else with the library's defaults."""
    import numpy as np
    import torch
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(threads)
    library, algorithm = name.split()
    env = Stopwatch(gym.make(ENV_ID))
    options = dict(policy_kwargs={"net_arch": [HIDDEN, HIDDEN]}, batch_size=BATCH_SIZE, buffer_size=LAST, device="cpu")
    options |= dict(learning_starts=WARM_UP, train_freq=1, gradient_steps=1, seed=1)
    if algorithm == "TD3":
        options |= dict(policy_delay=2, action_noise=NormalActionNoise(np.zeros(ACT_DIM), np.full(ACT_DIM, 0.1)))
    package = importlib.import_module({"SB3": "stable_baselines3", "SBX": "sbx"}[library])
    getattr(package, algorithm)("MlpPolicy", env, **options).learn(LAST)
    return env


def matmul_gflops() -> float:
    """Return R, the float32 rate of 256 x 256 x 256 products on one core in GFLOP/s: the median of 50 blocks of 100."""
    import torch

    torch.set_num_threads(1)
    a, b, out = (torch.rand(256, 256) for _ in range(3))
    rates = []
    for _ in range(50):
        started = time.perf_counter()
        for _ in range(100):
            torch.mm(a, b, out=out)
        rates.append(100 * 2 * 256**3 / (time.perf_counter() - started) / 1e9)
    return median(rates)


def measure(name: str, threads: int) -> float:
    """Return the rate of one contestant, or R, from a fresh process that may use `threads` cores and no more."""
    os.sched_setaffinity(0, CORES[:threads])  # handed down; XLA sizes its thread pool by it
    command = [sys.executable, str(Path(__file__).resolve()), name, str(threads)]
    with tempfile.TemporaryDirectory() as folder:  # for whatever the contestants write
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu", "TMPDIR": folder}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr}speed.py: {name} failed, see above; no results were written")
    return float(done.stdout.split()[-1])


# --- The arithmetic limit --------------------------------------------------------------------------------------------
def flops_per_step(algorithm: str) -> float:
    """Return the floating-point operations of the matrix products of one environment step's update."""
    heads = {"TD3": 1, "SAC": 2}[algorithm]  # SAC's actor gives a mean and a deviation
    actor = [(OBS_DIM, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, heads * ACT_DIM)]
    critic = [(OBS_DIM + ACT_DIM, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)]

    def products(layers) -> int:
        return 2 * BATCH_SIZE * sum(n * m for n, m in layers)

    def train(layers) -> int:  # forward, gradient of the weights, gradient of every layer's input but the first
        return 2 * products(layers) + products(layers[1:])

    # The critic in the actor's loss: forward, then back to the action alone.
    judge = products(critic) + products([(ACT_DIM, HIDDEN), *critic[1:]])
    critics = products(actor) + 2 * products(critic) + 2 * train(critic)
    if algorithm == "TD3":
        return critics + (train(actor) + judge) / 2
    return critics + train(actor) + 2 * judge + products(actor)  # the last: the temperature's own sample


# --- The report ------------------------------------------------------------------------------------------------------
def machine() -> str:
    models = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {len(CORES)} cores, {platform.system()}"


def spread(values) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(rows: list[dict]):
    """Print medians and, in brackets, ranges. A ratio is taken within each repetition."""

    def rates(name: str, threads: int = 1) -> list[float]:
        return [row["steps_per_second"] for row in rows if (row["name"], row["threads"]) == (name, threads)]

    def shares(name: str, threads: int = 1) -> list[float]:
        flops = flops_per_step("SAC" if "sac" in name.lower() else "TD3")
        found = [row for row in rows if (row["name"], row["threads"]) == (name, threads)]
        return [row["steps_per_second"] * flops / (threads * row["matmul_gflops"] * 1e9) for row in found]

    def ratios(ours: list[float], theirs: list[float]) -> list[float]:
        return [a / b for a, b in zip(ours, theirs, strict=True)]

    print(f"\nR = {spread([row['matmul_gflops'] for row in rows])} GFLOP/s on one core")
    print(f"TD3: {flops_per_step('TD3') / 1e9:.3f} GFLOP per step; SAC: {flops_per_step('SAC') / 1e9:.3f}")
    print(f"\n{'':22}{'threads':8}{'steps per second':26}share of the limit")
    for threads in THREADS:
        for name in CONTESTANTS:
            print(f"{name:22}{threads:<8}{spread(rates(name, threads)):26}{spread(shares(name, threads))}")

    targets = [
        ("camel_td3 / SB3 TD3", ratios(rates("camel_td3"), rates("SB3 TD3")), 1.5),
        ("camel_td3 / SBX TD3", ratios(rates("camel_td3"), rates("SBX TD3")), 1.0),
        ("camel_td3 / limit", shares("camel_td3"), 0.6),
        ("camel_sac / SB3 SAC", ratios(rates("camel_sac"), rates("SB3 SAC")), 1.5),
        ("camel_sac / SBX SAC", ratios(rates("camel_sac"), rates("SBX SAC")), 1.0),
    ]
    for name in ("camel_td3", "camel_sac"):
        targets.append((f"{name}, mask / none", ratios(rates(name), rates(f"{name} --no-mask")), 0.95))
        targets.append((f"{name}, 2 threads / 1", ratios(rates(name, 2), rates(name)), 1.4))
    print(f"\n{'':30}{'ratio':26}target")
    for label, values, target in targets:
        met = "met" if median(values) >= target else "not met"
        print(f"{label:30}{spread(values):26}{target:<6}{met}")


def main():
    if len(CORES) < max(THREADS):
        raise SystemExit(f"speed.py: needs Linux and {max(THREADS)} cores, to give each contestant cores of its own")
    try:
        versions = [f"{package} {importlib.metadata.version(package)}" for package in PACKAGES]
    except importlib.metadata.PackageNotFoundError as error:
        raise SystemExit(f"speed.py: {error.name} is missing; pip install -r benchmark/requirements-speed.txt")
    versions = "; ".join([f"python {platform.python_version()}", *versions])
    started, busy = time.time(), os.getloadavg()[0]
    print(f"{machine()}\n{versions}", flush=True)
    if busy > 0.5:
        print(f"the machine is busy (load average {busy:.1f}): only idle cores give numbers worth keeping", flush=True)
    rows = []
    for repetition in range(1, REPETITIONS + 1):
        for threads in THREADS:
            gflops = measure("R", 1)
            for name in CONTESTANTS:
                rate = measure(name, threads)
                print(f"repetition {repetition}, {threads} threads, {name}: {rate:.1f} steps/s", flush=True)
                row = {"name": name, "threads": threads, "repetition": repetition, "steps_per_second": rate}
                rows.append(row | {"matmul_gflops": gflops, "versions": versions, "machine": machine()})
    # Written at the end, under a temporary name first: an interrupted run leaves the last whole file.
    RESULTS.parent.mkdir(exist_ok=True)
    temporary = RESULTS.with_name(RESULTS.name + ".tmp")
    with open(temporary, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    os.replace(temporary, RESULTS)
    report(rows)
    print(f"\n{RESULTS.relative_to(ROOT)} written after {(time.time() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        try:
            main()
        except KeyboardInterrupt:
            raise SystemExit("speed.py: interrupted; no results were written")
    else:  # the process of one measurement
        name, threads = sys.argv[1], int(sys.argv[2])
        if name == "R":
            print(matmul_gflops())
        else:
            env = (time_script if name.startswith("camel") else time_peer)(name, threads)
            print((LAST - FIRST) / (env.times[1] - env.times[0]))
