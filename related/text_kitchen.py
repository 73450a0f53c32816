# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "gymnasium[mujoco]==1.4.0",
#     "numpy==2.4.6",
# ]
# ///
"""Small environments described in words: a kitchen, and FrozenLake in two sizes, not slippery.

    python related/text_kitchen.py      # 2 seconds: number of texts, optimum and uniform policy of each environment

`text_env(name)` returns a Gymnasium environment whose observation is a `str` that says all that matters, whose action is
an index, and whose `info["actions"]` names the admissible actions, in the order of the index. Everything here is
deterministic, so `transitions(name)` can list the whole of it and `value_iteration` can solve it.
"""

import copy
import string
from collections import deque

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Discrete, Text

HORIZON = {"frozen_lake_8x8": 100, "frozen_lake_4x4": 20, "kitchen": 50}
WORDS = Text(600, charset=string.ascii_letters + string.digits + " .,:;-")


class FrozenLakeText(gym.Wrapper):
    """FrozenLake-v1 in words: where the agent stands, where the goal is, what lies on the four sides."""

    actions = ("left", "down", "right", "up")  # FrozenLake's own order
    task = "You walk on a frozen lake, one field at a time. Reach the goal and never step into a hole."

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = WORDS
        self.tiles = np.pad(env.unwrapped.desc.astype(str), 1, constant_values="E")

    def text(self, state: int) -> str:
        size = self.tiles.shape[0] - 2
        row, column = divmod(int(state), size)
        goal_row, goal_column = (int(i[0]) - 1 for i in np.nonzero(self.tiles == "G"))
        names = {"S": "ice", "F": "ice", "H": "a hole", "G": "the goal", "E": "the edge"}
        sides = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
        around = [f"{side}: {names[self.tiles[row + 1 + i, column + 1 + j]]}" for side, (i, j) in sides.items()]
        return (
            f"You stand in row {row + 1}, column {column + 1} of a grid of {size} rows and {size} columns. "
            f"Row 1 is at the top, column 1 at the left. The goal is in row {goal_row + 1}, column {goal_column + 1}: "
            f"{goal_row - row} down and {goal_column - column} to the right of you. Beside you: {', '.join(around)}."
        )

    def reset(self, *, seed=None, options=None):
        state, info = self.env.reset(seed=seed, options=options)
        return self.text(state), info | {"actions": list(self.actions)}

    def step(self, action):
        state, reward, terminated, truncated, info = self.env.step(action)
        return self.text(state), float(reward), terminated, truncated, info | {"actions": list(self.actions)}


class Kitchen(gym.Env):
    """Serve a salad of a chopped tomato and a chopped lettuce. There is one cutting board.

    Seven macro-actions, whose names say what they do now: `walk to the cutting board` becomes `put the tomato on the
    cutting board` for who stands there with it. What can not be done is an action without effect (`chop nothing`).
    Reward: 0.2 for each ingredient when it is chopped, 1 for the salad, -0.1 for serving an unfinished one, -0.001 a
    step. Nothing that is chopped or in the bowl can be undone, so each sub-task pays once an episode.
    Optimum: 1.4 - 15 * 0.001 = 1.385, since each ingredient has to be picked up, carried, put down and chopped, picked
    up, carried and put into the bowl (7 steps), and the bowl has to be served.
    """

    task = (
        "You cook in a kitchen. Recipe: 1. Pick up the tomato, walk to the cutting board, put it on the cutting board, "
        "chop it, pick it up, walk to the bowl, put it into the bowl. 2. The same with the lettuce. 3. Serve the bowl."
    )

    def __init__(self):
        self.observation_space, self.action_space = WORDS, Discrete(7)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = {"tomato": "table", "lettuce": "table"}  # or hand, board, bowl
        self.chopped = {"tomato": False, "lettuce": False}
        self.stand = "table"  # or cutting board, bowl
        return self.text(), {"actions": self.actions()}

    def content(self, place: str) -> list[str]:
        """What lies in a place, with its state: `chopped tomato`."""
        return [("chopped " if self.chopped[x] else "") + x for x in self.place if self.place[x] == place]

    def text(self) -> str:
        """The state, in words. Equal texts are equal states."""

        def listed(place):
            return " and ".join(self.content(place)) or "nothing"

        return (
            f"You stand at the {self.stand}. In your hand: {listed('hand')}. On the table: {listed('table')}. "
            f"On the cutting board: {listed('board')}. In the bowl: {listed('bowl')}."
        )

    def actions(self) -> list[str]:
        hand, board, bowl = self.content("hand"), self.content("board"), self.content("bowl")
        raw = bool(hand) and hand[0] in self.place
        names = []
        for x, place in self.place.items():
            name = ("chopped " if self.chopped[x] else "") + x
            names.append(f"pick up the {name}" if not hand and place in ("table", "board") else f"ignore the {name}")
        if self.stand != "cutting board":
            names += ["walk to the cutting board", "chop nothing"]
        else:
            names.append(
                f"put the {hand[0]} on the cutting board" if raw and not board else "wait at the cutting board"
            )
            names.append(f"chop the {board[0]}" if board and board[0] in self.place and not hand else "chop nothing")
        if self.stand != "bowl":
            names += ["walk to the bowl", "serve nothing"]
        else:
            names.append(f"put the {hand[0]} into the bowl" if hand and not raw else "wait at the bowl")
            names.append("serve the bowl" if bowl and not hand else "serve nothing")
        return names + [f"put the {hand[0]} back on the table" if raw else "put nothing back"]

    def step(self, action):
        name, reward, terminated = self.actions()[action], -0.001, False
        thing = name.split()[-1]
        in_hand = next((x for x in self.place if self.place[x] == "hand"), None)
        if name.startswith("pick up"):
            self.stand = "table" if self.place[thing] == "table" else "cutting board"
            self.place[thing] = "hand"
        elif name.startswith("walk to"):
            self.stand = name.removeprefix("walk to the ")
        elif name.endswith("on the cutting board"):
            self.place[in_hand] = "board"
        elif name.endswith("into the bowl"):
            self.place[in_hand] = "bowl"
        elif name.endswith("back on the table"):
            self.place[in_hand], self.stand = "table", "table"
        elif name.startswith("chop the"):
            self.chopped[thing] = True
            reward += 0.2
        elif name == "serve the bowl":
            terminated = len(self.content("bowl")) == len(self.place)
            reward += 1.0 if terminated else -0.1
        return self.text(), reward, terminated, False, {"actions": self.actions()}


def text_env(name: str) -> gym.Env:
    """Return the environment of that name. Observations are `str`; `info["actions"]` names the actions, by index.

    Its attribute `task` says in words what is to be done. Raises SystemExit for a name that is not in HORIZON.
    """
    if name not in HORIZON:
        raise SystemExit(f"--env-id {name}: must be one of {', '.join(HORIZON)}")
    if name == "kitchen":
        return gym.wrappers.TimeLimit(Kitchen(), HORIZON[name])
    size = name.removeprefix("frozen_lake_")
    lake = gym.make("FrozenLake-v1", map_name=size, is_slippery=False, max_episode_steps=HORIZON[name])
    return FrozenLakeText(lake)


# --- The whole of an environment, and its optimum --------------------------------------------------------------------
def transitions(name: str) -> dict[str, list[tuple[str, float, bool, str]]]:
    """Return, for every text that can be reached and is not terminal, `(action name, reward, terminated, next text)`
    of each action, by breadth-first search from the reset. The first text is that of the reset.
    """
    env = text_env(name)
    text, info = env.reset(seed=0)
    table, queue = {}, deque([(text, info["actions"], env)])
    while queue:
        text, names, env = queue.popleft()
        if text in table:
            continue
        table[text] = []
        for action, action_name in enumerate(names):
            branch = copy.deepcopy(env)
            next_text, reward, terminated, _, info = branch.step(action)
            table[text].append((action_name, reward, terminated, next_text))
            if not terminated:
                queue.append((next_text, info["actions"], branch))
    return table


def value_iteration(table: dict, gamma: float = 0.99, sweeps: int = 1000) -> dict[str, np.ndarray]:
    """Return Q*(text, .) of each text: (num_actions,) arrays. With gamma = 1 and sweeps = h: of h steps to go."""
    q = {text: np.zeros(len(actions)) for text, actions in table.items()}
    for _ in range(sweeps):
        old, change = {text: values.max() for text, values in q.items()}, 0.0
        for text, actions in table.items():
            new = np.array([r + (0.0 if done else gamma * old[next_text]) for _, r, done, next_text in actions])
            change, q[text] = max(change, abs(new - q[text]).max()), new
        if change < 1e-12:
            break
    return q


def play(env: gym.Env, policy, seed: int) -> float:
    """Return the undiscounted return of one episode of `policy(text) -> action`, from the reset with that seed."""
    text, _ = env.reset(seed=seed)
    total, done = 0.0, False
    while not done:
        text, reward, terminated, truncated, _ = env.step(policy(text))
        total, done = total + reward, terminated or truncated
    return total


def main():
    for name in HORIZON:
        env, table, rng = text_env(name), transitions(name), np.random.default_rng(0)
        start = next(iter(table))
        optimum = value_iteration(table, gamma=1.0, sweeps=HORIZON[name])[start].max()

        def uniform_policy(text, rng=rng, table=table):
            return rng.integers(len(table[text]))

        uniform = np.mean([play(env, uniform_policy, seed) for seed in range(500)])
        print(f"{name}: {len(table)} texts, optimum {optimum:.3f}, uniform policy {uniform:.3f}")


if __name__ == "__main__":
    main()
