"""Environments of many agents, stepped together: in this process, or in some of their own."""

import multiprocessing
import pickle
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

mujoco: Any = import_module("mujoco")  # its types are made as it is imported

# A process that holds a GPU, or threads, must not be copied; a server that holds neither may be.
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
RESET = np.iinfo(np.int64).max  # in the place of a seed: go on with the stream that there is


class Moves(NamedTuple):
    """What environments are told, and what they tell; the same memory in all processes."""

    what: np.ndarray  # (E,): 0 nothing, 1 step, 2 reset
    seed: np.ndarray  # (E,): to reset with
    action: np.ndarray  # (E, n), between -1 and 1; of the shorter ones, zeros follow
    state: np.ndarray  # (E, S): where the next action is taken; after the end, of a new episode
    following: np.ndarray  # (E, S): where the last action has led
    reward: np.ndarray  # (E,)
    terminated: np.ndarray  # (E,)
    truncated: np.ndarray  # (E,)


def layout(count: int, sizes: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and types of all of it."""
    states, actions = sizes
    return {
        "what": ((count,), np.int8), "seed": ((count,), np.int64),
        "action": ((count, actions), np.float32), "state": ((count, states), np.float32),
        "following": ((count, states), np.float32), "reward": ((count,), np.float32),
        "terminated": ((count,), np.bool_), "truncated": ((count,), np.bool_),
    }  # fmt: skip


def moves_in(memory: Any, count: int, sizes: tuple[int, int]) -> Moves:
    """Views of one block of memory."""
    arrays, at = {}, 0
    for name, (shape, dtype) in layout(count, sizes).items():
        arrays[name] = np.ndarray(shape, dtype, memory, at)
        at += -(-arrays[name].nbytes // 64) * 64
    return Moves(**arrays)


def room(count: int, sizes: tuple[int, int]) -> int:
    """How many bytes that takes."""
    shapes = layout(count, sizes).values()
    return sum(-(-int(np.prod(s)) * np.dtype(t).itemsize // 64) * 64 for s, t in shapes)


class World:
    """One environment of a task."""

    def __init__(self, task: str, options: dict[str, Any]):
        self.env = gym.make(task, disable_env_checker=True, **options)
        spaces: Any = self.env.observation_space, self.env.action_space
        self.sizes = int(np.prod(spaces[0].shape)), int(np.prod(spaces[1].shape))
        low, high = spaces[1].low, spaces[1].high
        self.middle, self.half = (high + low) / 2, (high - low) / 2

    def move(self, moves: Moves, i: int) -> None:
        """Do what it is told."""
        S, n = self.sizes
        if moves.what[i] == 2:
            seed = None if moves.seed[i] == RESET else int(moves.seed[i])
            moves.state[i, :S] = self.env.reset(seed=seed)[0]
        elif moves.what[i] == 1:
            action = self.middle + self.half * moves.action[i, :n]
            state, reward, terminated, truncated, _ = self.env.step(action)
            moves.following[i, :S] = moves.state[i, :S] = state
            moves.reward[i], moves.terminated[i], moves.truncated[i] = reward, terminated, truncated
            if terminated or truncated:
                moves.state[i, :S] = self.env.reset()[0]

    def kept(self) -> dict[str, Any]:
        """All that its future depends on."""
        env: Any = self.env.unwrapped
        limits = [w for w in layers(self.env) if isinstance(w, gym.wrappers.TimeLimit)]
        return {
            # All of it: rewards depend on places of bodies that are older than joints.
            "physics": pickle.dumps(env.data),
            "random": env.np_random.bit_generator.state,
            "steps": limits[0]._elapsed_steps if limits else None,
        }

    def restore(self, kept: dict[str, Any]) -> None:
        """Go on from there."""
        env: Any = self.env.unwrapped
        self.env.reset(seed=0)
        mujoco.mj_copyData(env.data, env.model, pickle.loads(kept["physics"]))
        env.np_random.bit_generator.state = kept["random"]
        for wrapper in layers(self.env):
            if isinstance(wrapper, gym.wrappers.TimeLimit):
                wrapper._elapsed_steps = kept["steps"]


def layers(env: Any) -> list[Any]:
    """An environment's wrappers."""
    found = []
    while isinstance(env, gym.Wrapper):
        found.append(env)
        env = env.env
    return found


class Worlds:
    """Environments, of one task or of several.

    Args:
        tasks: The name of each.
        workers: Processes to spread them over; 0 for this one.
        options: For `gymnasium.make`.

    Attributes:
        sizes: Lengths of states and actions, of each.
        wide: The largest of them.
    """

    def __init__(self, tasks: Sequence[str], workers: int = 0, **options: Any):
        kinds = {task: World(task, options) for task in dict.fromkeys(tasks)}
        self.sizes = [kinds[task].sizes for task in tasks]
        self.wide = max(s for s, _ in self.sizes), max(n for _, n in self.sizes)
        self.count, self.memory = len(tasks), None
        self.own: list[World] = []
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        size = room(self.count, self.wide)
        if not workers:
            # The first of each kind is there already.
            self.own = [kinds.pop(task, None) or World(task, options) for task in tasks]
            self.moves = moves_in(bytearray(size), self.count, self.wide)
            return
        for one in kinds.values():
            one.env.close()
        self.memory = SharedMemory(create=True, size=size)
        self.moves = moves_in(self.memory.buf, self.count, self.wide)
        context: Any = multiprocessing.get_context(START)
        if START == "forkserver":
            context.set_forkserver_preload([__name__])  # imported once, for all processes
        # In turn: those of one kind may rest while others move.
        workers = min(workers, self.count)
        self.parts = [np.arange(i, self.count, workers) for i in range(workers)]
        for part in self.parts:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work, daemon=True,
                args=(theirs, self.memory.name, tasks, self.wide, options, part),
            )  # fmt: skip
            process.start()
            theirs.close()  # so that we are told if the process is no more
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self) -> None:
        """Let all do what `moves.what` says."""
        for pipe in self.pipes:
            pipe.send("move")

    def wait(self) -> Moves:
        """Until it is done."""
        for i, world in enumerate(self.own):
            world.move(self.moves, i)
        for pipe in self.pipes:
            pipe.recv()
        return self.moves

    def kept(self) -> list[dict[str, Any]]:
        """All that their future depends on."""
        for pipe in self.pipes:
            pipe.send("keep")
        if self.own:
            return [world.kept() for world in self.own]
        found: dict[int, dict[str, Any]] = {}
        for pipe, part in zip(self.pipes, self.parts, strict=True):
            found |= dict(zip(part.tolist(), pipe.recv(), strict=True))
        return [found[i] for i in range(self.count)]

    def restore(self, kept: list[dict[str, Any]]) -> None:
        """Go on from there."""
        for world, one in zip(self.own, kept, strict=False):
            world.restore(one)
        for pipe, part in zip(self.pipes, self.parts if self.pipes else [], strict=True):
            pipe.send([kept[i] for i in part])
            pipe.recv()

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join()
        self.pipes = []
        if self.memory is not None:
            del self.moves
            self.memory.close()
            self.memory.unlink()
            self.memory = None


def work(
    pipe: Connection, name: str, tasks: Sequence[str], wide: tuple[int, int],
    options: dict[str, Any], part: np.ndarray,
) -> None:  # fmt: skip
    """What a process does, until nobody is there to tell it."""
    memory = SharedMemory(name=name)
    moves = moves_in(memory.buf, len(tasks), wide)
    worlds = [World(tasks[int(i)], options) for i in part]
    while (told := received(pipe)) is not None:
        if told == "move":
            for i, world in zip(part, worlds, strict=True):
                world.move(moves, i)
            pipe.send(None)
        elif told == "keep":
            pipe.send([world.kept() for world in worlds])
        else:
            for world, one in zip(worlds, told, strict=True):
                world.restore(one)
            pipe.send(None)
    del moves
    memory.close()


def received(pipe: Connection) -> Any:
    """What it is told; `None` from one that is closed."""
    try:
        return pipe.recv()
    except EOFError:
        return None
