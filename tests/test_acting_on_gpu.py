"""Acting, publishing and saving on a GPU: as on a CPU, and how often anything is launched, copied or waited for."""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

import evaluate
from appo import APPO, load
from config import Config, algorithm_class, make_config
from distributions import SquashedGaussian
from envs.flat_spaces import ACTION_MASK
from envs.vector_env import EnvInfo
from model import ActorCritic
from normalizers import ReturnNormalizer, RunningNormalizer
from policy_worker import PolicyWorker
from runtime import checkpoint, packing
from runtime.acceleration import Recorded
from runtime.generators import OwnNumbers, fork_rng
from runtime.inbox import SPLIT
from runtime.packing import Packing
from shared_buffers import SharedBuffers
from tools import export
from tools.pretend_gpu import DEVICE, Counts, PretendGPU
from weights import CURRENT, SharedWeights

CPU, GPU = torch.device("cpu"), torch.device("privateuseone", 0)  # DEVICE, once it is registered
SPLITS, ENVS = 2, 3  # of the only rollout worker; of each split

IMAGE = {"obs": spaces.Box(0, 255, (4, 36, 36), np.uint8)}
VECTOR = {"obs": spaces.Box(-1, 1, (4,), np.float32)}
MANY = {"near": spaces.Box(-1, 1, (5,), np.float32), "room": spaces.Discrete(7), "bits": spaces.MultiBinary(3),
        "map": spaces.Box(0, 255, (3, 12, 12), np.uint8), ACTION_MASK: spaces.MultiBinary(4)}
BOX = spaces.Box(-1, 1, (3,), np.float32)


class Case(NamedTuple):
    """A policy, and how many operators a batch of acting takes."""

    obs: dict[str, spaces.Space]
    actions: spaces.Space
    launches: int
    settings: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "images": Case(IMAGE, spaces.Discrete(6), 31),
    "images in bfloat16": Case(IMAGE, spaces.Discrete(6), 33, {"precision": "bfloat16"}),
    "a Dict with a mask": Case(MANY, spaces.Discrete(4), 50),
    "all kinds of actions": Case(VECTOR, spaces.Tuple([spaces.Discrete(3), BOX, spaces.MultiBinary(2)]), 45),
    "GRU": Case(VECTOR, spaces.Discrete(2), 27, {"use_rnn": True, "rnn_type": "gru"}),
    "LSTM": Case(VECTOR, spaces.Discrete(2), 30, {"use_rnn": True, "rnn_type": "lstm"}),
    "squashed": Case(VECTOR, BOX, 35, {"squash_actions": True}),
    "apex": Case(VECTOR, spaces.Discrete(4), 32, {"algo": "apex"}),
    "pql": Case(VECTOR, BOX, 17, {"algo": "pql"}),
}


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with PretendGPU() as device:
        yield device


def random_leaf(space: spaces.Space, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    if isinstance(space, spaces.Discrete):
        return torch.as_tensor(rng.integers(space.n, size=shape))
    if space.dtype == np.float32:
        return torch.as_tensor(rng.normal(size=shape))
    return torch.as_tensor(rng.integers(256 if isinstance(space, spaces.Box) else 2, size=shape))


class Acting:
    """A policy worker on a device, and trajectories with random observations."""

    def __init__(self, case: Case, device: torch.device, num_policies: int = 1, **more: Any) -> None:
        settings = {"precision": "float32", "rnn_size": 8, "encoder_mlp_layers": (16,), "rollout": 8,
                    "encoder_conv_mlp_layers": (16,), **case.settings, **more}
        self.cfg: Config = make_config(
            {"env": "test", "device": "cpu", "num_workers": 1, "num_envs_per_worker": SPLITS * ENVS,
             "worker_num_splits": SPLITS, "batch_size": 48, "num_policies": num_policies}, settings)
        algorithm = algorithm_class(self.cfg.algo)(self.cfg)
        torch.manual_seed(0)
        models = [algorithm.make_model(case.obs, case.actions) for _ in range(num_policies)]
        for model in models:
            nn.init.normal_(model.policy_head.weight)  # actions differ
            algorithm.carry_settings(model)
        agents = ["a", "b"][:num_policies]  # in each environment
        info = EnvInfo(agents, [0] * len(agents), [(case.obs, case.actions)], None)
        self.buffers = SharedBuffers(self.cfg, info, [0] * num_policies, [model.to(device) for model in models],
                                     [device] * num_policies, None)
        self.weights, self.trajectories = self.buffers.policies[0].weights, self.buffers.trajectories_of(0)
        self.worker = PolicyWorker(self.cfg, self.buffers, 0, device)
        self.buffers.awaited_policy.fill_(0)
        self.buffers.agent_slot.copy_(torch.arange(self.buffers.agent_slot.numel()).view_as(self.buffers.agent_slot))
        rng = np.random.default_rng(1)
        for name, tensor in self.trajectories.items():
            if name.startswith("obs/"):
                tensor.copy_(random_leaf(case.obs[name.removeprefix("obs/")], tensor.shape, rng))
        if ACTION_MASK in case.obs:
            self.trajectories[f"obs/{ACTION_MASK}"][..., 1] = 1  # something is allowed

    def serve(self, *splits: int) -> None:
        self.buffers.asked[:] += 1
        self.worker.serve([(SPLIT, split) for split in splits or range(SPLITS)])

    def rollout(self) -> dict[str, Tensor]:
        """Act for a whole trajectory; an episode begins in its middle for some."""
        self.trajectories["new_episode"][::2, 4] = True
        for t in range(self.cfg.rollout):
            self.buffers.agent_t.fill_(t)
            self.serve(*[t % SPLITS] if t == 5 else [])  # a smaller batch in between
        return {name: tensor.clone() for name, tensor in self.trajectories.items()}


# ---- acting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_one_copy_up_one_down_one_wait_and_few_operators(gpu: PretendGPU, name: str) -> None:
    acting = Acting(CASES[name], GPU)
    acting.serve()
    gpu.take_counts()
    acting.serve()
    assert gpu.take_counts() == Counts(CASES[name].launches, up=1, down=1, waits=1)


@pytest.mark.parametrize("name", CASES)
def test_trajectories_are_those_of_a_cpu(gpu: PretendGPU, name: str) -> None:
    found = []
    for device in (CPU, GPU):
        acting = Acting(CASES[name], device)
        torch.manual_seed(2)
        found.append(acting.rollout())
    on_cpu, on_gpu = found
    error = 0.05 if "bfloat16" in name else 1e-4
    for column, tensor in on_cpu.items():
        torch.testing.assert_close(on_gpu[column], tensor, rtol=error, atol=error, msg=lambda text, c=column: c + text)
    assert not on_cpu["actions"].isnan().any()
    assert len(on_cpu["actions"].unique()) > 1


def test_each_policy_and_each_snapshot_is_one_batch(gpu: PretendGPU) -> None:
    acting = Acting(CASES["GRU"], GPU, num_policies=2, self_play_past_fraction=0.5)
    acting.weights.add_snapshot(acting.worker.models[CURRENT][0], 0)
    acting.buffers.awaited_policy[:, 1::2] = 1  # the other policy's
    acting.buffers.agent_snapshot[:, ::4] = 0
    acting.serve()
    gpu.take_counts()
    acting.serve()
    assert gpu.take_counts() == Counts(2 * CASES["GRU"].launches, up=2, down=2, waits=2)
    acting.buffers.agent_snapshot.fill_(CURRENT)
    acting.serve()
    assert gpu.take_counts() == Counts(CASES["GRU"].launches, up=1, down=1, waits=1)


def test_there_is_a_graph_for_each_size_of_a_batch_and_each_snapshot(gpu: PretendGPU) -> None:
    """All act as without a graph, and each is one launch after its warm-up."""
    found = []
    for cuda_graphs in (False, True):
        acting = Acting(CASES["GRU"], GPU, num_policies=2, self_play_past_fraction=0.5, cuda_graphs=cuda_graphs)
        acting.weights.add_snapshot(acting.worker.models[CURRENT][0], 0)
        nn.init.ones_(acting.worker.models[CURRENT][0].policy_head.weight.data)  # the snapshot has others
        torch.manual_seed(2)
        for turn in range(12):
            acting.buffers.agent_t.fill_(turn % acting.cfg.rollout)
            acting.buffers.agent_snapshot.fill_(CURRENT if turn % 2 else 0)
            for splits in ((), (turn % SPLITS,)):
                gpu.take_counts()
                acting.serve(*splits)
                counts = gpu.take_counts()
                found.append(acting.trajectories["action_parameters"].clone())
        assert counts == Counts(1 if cuda_graphs else CASES["GRU"].launches, up=1, down=1, waits=1)
    plain, graphs = found[: len(found) // 2], found[len(found) // 2 :]
    for one, other in zip(plain, graphs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    (newest, _), (snapshot, _) = (plain[-1][:, t].std(-1).aminmax() for t in (3, 2))  # of turns 11 and 10
    assert newest == 0 < snapshot


class WithColumns(algorithm_class("appo")):
    """Adds columns of other dtypes to a trajectory, one of them a part of another tensor."""

    def act(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[dict[str, Tensor], Tensor]:
        columns, states = super().act(model, *args, **kwargs)
        index = columns["actions"].long()
        both = torch.stack([columns["values"], -columns["values"]], 1)
        return columns | {"index": index, "is_one": index[:, 0] == 1, "minus": both[:, 1],
                          "double": columns["values"].double()[:, None].expand(-1, 3)}, states


def test_columns_of_all_dtypes_come_back_in_one_copy(gpu: PretendGPU) -> None:
    acting = Acting(CASES["LSTM"], GPU)
    acting.serve()
    gpu.take_counts()
    acting.worker.algorithm, length = WithColumns(acting.cfg), acting.cfg.rollout
    for name, dtype, shape in (("index", torch.int64, (1,)), ("is_one", torch.bool, ()), ("minus", torch.float32, ()),
                               ("double", torch.float64, (3,))):
        acting.worker.columns.add(name)
        acting.worker.rows[name] = torch.zeros(len(acting.trajectories["valid"]) * length, *shape, dtype=dtype)
    acting.serve()
    counts = gpu.take_counts()
    assert (counts.up, counts.down, counts.waits) == (1, 1, 1)
    rows = {name: tensor[::length] for name, tensor in acting.worker.rows.items() if len(tensor) % length == 0}
    values = acting.trajectories["values"][:, 0]
    assert values.all()
    assert torch.equal(rows["minus"], -values)
    assert torch.equal(rows["double"], values.double()[:, None].repeat(1, 3))
    assert torch.equal(rows["index"].float(), acting.trajectories["actions"][:, 0])
    assert torch.equal(rows["is_one"], acting.trajectories["actions"][:, 0, 0] == 1)


DTYPES = (torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float16, torch.float32, torch.int64,
          torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_any_shapes_and_dtypes_go_up_and_come_down_as_they_are(gpu: PretendGPU, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for count in (1, 3, 2, 17, 5):
        sources, rows = {}, {}
        for number in range(rng.integers(1, 12)):
            shape = (int(rng.integers(1, 30)), *rng.integers(0, 5, rng.integers(0, 4)).tolist())
            tensor = torch.as_tensor(rng.integers(0, 100, shape)).to(DTYPES[rng.integers(len(DTYPES))])
            sources[str(number)], rows[str(number)] = tensor, torch.as_tensor(rng.integers(0, len(tensor), count))
        packing = Packing(GPU, sources, 17, graphs=False)
        gpu.take_counts()
        above = packing.up(sources, rows)
        assert gpu.take_counts() == Counts(up=1)
        below = packing.run(lambda batch: dict(reversed(batch.items())), above, "")
        assert gpu.take_counts() == Counts(launches=1, down=1, waits=1)
        assert below.keys() == sources.keys()
        for name, tensor in sources.items():
            assert (above[name].device.type, above[name].dtype) == (DEVICE, tensor.dtype)
            assert below[name].dtype == tensor.dtype
            assert below[name].tolist() == [tensor[index].tolist() for index in rows[name].tolist()]


def test_graphs_act_as_without_and_sizes_above_the_limit_have_none(
        gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_GRAPHS", 2)
    found = []
    for cuda_graphs in (False, True):
        acting = Acting(CASES["GRU"], GPU, cuda_graphs=cuda_graphs)
        torch.manual_seed(2)
        found.append(acting.rollout())
        acting.serve(0)
    assert len(acting.worker.packing.graphs) == 2, "of one split and of two"
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, msg=lambda text, name=name: name + text)
    sources = {"x": torch.arange(10.0)}
    packed = Packing(GPU, sources, 10, graphs=True)
    for _ in range(Recorded.WARM_UPS + 2):
        for count in (1, 2, 3):
            batch = packed.up(sources, {"x": torch.arange(count)})
            gpu.take_counts()
            assert packed.run(lambda batch: {"y": 2 * batch["x"] + 1}, batch, "")["y"].tolist() == [1, 3, 5][:count]
            launches = gpu.take_counts().launches
        assert launches == 3, "the third size as it is"
    assert [key[1] for key in packed.graphs] == [1, 2]


def test_nothing_is_packed_on_a_cpu() -> None:
    assert Acting(CASES["GRU"], CPU).worker.packing is None


def test_the_nodes_of_a_quadrature_go_up_once(gpu: PretendGPU) -> None:
    parameters = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    expected, above = SquashedGaussian(parameters).entropy(), parameters.to(GPU)
    SquashedGaussian(above).entropy()
    gpu.take_counts()
    found = SquashedGaussian(above).entropy()
    counts = gpu.take_counts()
    assert (counts.up, counts.waits) == (0, 0)
    torch.testing.assert_close(found.cpu(), expected)


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "launches"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_weights_are_published_by_one_launch_and_taken_over_by_one_for_each_dtype(
        gpu: PretendGPU, dtype: torch.dtype, launches: int) -> None:
    case = CASES["images"]
    cfg = make_config({"env": "test", "num_workers": 1, "encoder_conv_mlp_layers": (16,)})
    model, reader = (ActorCritic(cfg, case.obs, case.actions) for _ in range(2))
    expected = {name: tensor.to(dtype if name.startswith("encoder.") else torch.float32)
                for name, tensor in model.state_dict().items()}
    model, reader = model.to(GPU), reader.to(GPU).body_to(dtype)
    weights = SharedWeights(reader, GPU, 1)
    gpu.take_counts()
    weights.publish(model, 7, wait=False)
    assert gpu.take_counts() == Counts(launches=1)
    torch.get_device_module(GPU).synchronize()
    weights.finish_publishing()
    gpu.take_counts()
    assert weights.refresh(reader) == 7
    assert gpu.take_counts() == Counts(launches, waits=1)
    for name, tensor in reader.state_dict().items():
        assert torch.equal(tensor.cpu(), expected[name]), name


def constant(value: float) -> nn.Module:
    model = nn.Linear(50, 3)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


class SlowGPU:
    """Stands for a GPU on which copies and events are done when `work` is called, one after another."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.waits = 0

    def work(self) -> None:
        self.queue.pop(0)()


class SlowEvent:
    """An event of it."""

    def __init__(self, gpu: SlowGPU) -> None:
        self.gpu, self.passed = gpu, False
        gpu.queue.append(lambda: setattr(self, "passed", True))

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.gpu.waits += 1
        while not self.passed:
            self.gpu.work()


class SlowWeights(SharedWeights):
    """The writer's end of weights on such a GPU: a copy is done in two halves. Readers have another view of them."""

    def __init__(self, gpu: SlowGPU) -> None:
        self.gpu = gpu
        super().__init__(constant(0.0), CPU, 1)

    def _write(self, row: int, model: nn.Module) -> None:
        flat = torch.cat([tensor.detach().flatten() for tensor in model.state_dict().values()])
        half = len(flat) // 2
        self.gpu.queue += [lambda: self._flat[row, :half].copy_(flat[:half]),
                           lambda: self._flat[row, half:].copy_(flat[half:])]

    def _mark(self) -> SlowEvent:
        return SlowEvent(self.gpu)

    def reader(self) -> SharedWeights:
        other = copy.copy(self)
        other.__class__ = SharedWeights
        return other


def seen(weights: SharedWeights) -> tuple[int, set[float]]:
    """Return the newest version and its different numbers, as a reader sees them."""
    model = constant(-1.0)
    version = weights.refresh(model)
    assert version == weights.version
    return version, {float(value) for tensor in model.state_dict().values() for value in tensor.unique()}


def test_weights_count_when_a_gpu_has_copied_them_and_a_reader_never_sees_half_of_them() -> None:
    gpu = SlowGPU()
    weights = SlowWeights(gpu)
    reader = weights.reader()
    assert (seen(reader), gpu.waits) == ((0, {0.0}), 1)
    for version in range(1, 5):
        weights.publish(constant(version), version, wait=False)
        while gpu.queue:
            weights.finish_publishing(wait=False)
            assert seen(reader) == (version - 1, {version - 1.0})
            gpu.work()
        weights.finish_publishing(wait=False)
        assert seen(reader) == (version, {float(version)})
    assert gpu.waits == 1, "only for the first weights"


def test_the_next_publication_waits_for_one_that_is_not_finished_and_the_last_one_is_waited_for() -> None:
    gpu = SlowGPU()
    weights = SlowWeights(gpu)
    reader, waits = weights.reader(), gpu.waits
    weights.publish(constant(1.0), 1, wait=False)
    weights.publish(constant(2.0), 2, wait=False)
    assert (seen(reader), gpu.waits - waits) == ((1, {1.0}), 1)
    gpu.work()  # a half of the second one, into the row that was read before the first one
    assert seen(reader) == (1, {1.0})
    weights.finish_publishing()
    assert (seen(reader), gpu.waits - waits) == ((2, {2.0}), 2)
    weights.publish(constant(3.0), 3)
    assert (seen(reader), gpu.waits - waits) == ((3, {3.0}), 3)


def test_a_snapshot_is_there_when_a_gpu_has_copied_it() -> None:
    gpu, model = SlowGPU(), constant(-1.0)
    weights = SlowWeights(gpu)
    weights.add_snapshot(constant(5.0), 4)
    assert weights.reader().refresh(model, 0) == 4
    assert model.bias.tolist() == [5.0] * 3


def test_a_reader_whose_copy_was_overtaken_on_the_gpu_reads_again() -> None:
    gpu = SlowGPU()
    weights = SlowWeights(gpu)
    reader, versions = weights.reader(), iter((1, 2))

    def wait_for_own_copy() -> None:
        for version in versions:
            weights.publish(constant(version), version)

    reader._finish_copies = wait_for_own_copy
    assert seen(reader) == (2, {2.0})


# ---- normalizers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("obs", [IMAGE["obs"], VECTOR["obs"]], ids=["images", "vectors"])
def test_running_statistics_move_without_a_wait(gpu: PretendGPU, obs: spaces.Box) -> None:
    rng = np.random.default_rng(0)
    normalizer = RunningNormalizer(make_config({"env": "test", "num_workers": 1}), obs).to(GPU)
    unit, batches = (255.0 if obs.dtype == np.uint8 else 1.0), []
    for count in (0, 20, 1, 7):
        batches.append(random_leaf(obs, (count, *obs.shape), rng) + (0 if unit > 1 else 1000.0))
        batch = batches[-1].to(torch.uint8 if unit > 1 else torch.float32).to(GPU)
        gpu.take_counts()
        normalizer.update(batch)
        counts = gpu.take_counts()
        assert (counts.up, counts.down, counts.waits) == (0, 0, 0)
    before = {name: tensor.cpu() for name, tensor in normalizer.state_dict().items()}
    normalizer.update(batch[:0])
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in normalizer.state_dict().items())
    rows = np.concatenate(batches) / unit
    np.testing.assert_allclose(before["mean"].double() + before["remainder"], rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(before["var"], rows.var(0), rtol=1e-4)
    expected = ((rows[-7:] - rows.mean(0)) / np.sqrt(rows.var(0) + RunningNormalizer.EPSILON)).clip(-5, 5)
    np.testing.assert_allclose(normalizer(batch, torch.float32).cpu(), expected, atol=1e-3)


def test_returns_move_without_a_wait_and_not_at_all_without_valid_rows(gpu: PretendGPU) -> None:
    rng = torch.Generator().manual_seed(0)
    shape, normalizers = (6, 5), [ReturnNormalizer(running=True), ReturnNormalizer(running=True).to(GPU)]
    for share in (0.0, 0.7, 0.0, 1.0):
        columns = (torch.randn(shape, generator=rng) + 1, torch.rand(shape, generator=rng) < 0.2,
                   torch.rand(shape, generator=rng) < 0.2, torch.rand(shape, generator=rng) < share)
        above = [column.to(GPU) for column in columns]
        before = {name: tensor.clone() for name, tensor in normalizers[0].state_dict().items()}
        gpu.take_counts()
        normalizers[1].update(*above, 0.99)
        counts = gpu.take_counts()
        assert (counts.up, counts.down, counts.waits) == (0, 0, 0)
        normalizers[0].update(*columns, 0.99)
        for name, tensor in normalizers[0].state_dict().items():
            assert torch.equal(tensor, normalizers[1].state_dict()[name].cpu())
            assert torch.equal(tensor, before[name]) == (share == 0), name


# ---- files, evaluation -----------------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_gpu_loads_without_one_and_back(gpu: PretendGPU, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(GPU)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4).to(GPU)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sgd_steps": 1, "env_steps": 2,
             "algo": "appo", "more": [{"tensor": torch.ones(3).to(GPU)}, (1, "two")]}
    path = tmp_path / checkpoint.BEST
    checkpoint.save_checkpoint(state, path)
    found = checkpoint.load_checkpoint(path)
    assert found["more"][0]["tensor"].tolist() == [1, 1, 1]
    assert found["more"][1] == (1, "two")
    for device in (CPU, GPU):
        other = nn.Linear(4, 2).to(device)
        checkpoint.load_weights(other, found, path, "appo")
        again = torch.optim.Adam(other.parameters())
        again.load_state_dict(found["optimizer"])
        for own, copied in zip(model.parameters(), other.parameters(), strict=True):
            assert copied.device.type == device.type
            assert torch.equal(own.cpu(), copied.cpu())
            for name, tensor in optimizer.state[own].items():
                assert torch.equal(tensor.cpu(), again.state[copied][name].cpu()), name


def test_own_numbers_go_on_and_leave_the_others_alone(gpu: PretendGPU) -> None:
    generators = torch.default_generator, *torch.get_device_module(GPU).default_generators  # of the CPU and two GPUs

    def draw_with_all() -> list[list[float]]:
        return [torch.rand(4, generator=generator).tolist() for generator in generators]

    for number, generator in enumerate(generators):
        generator.manual_seed(number)
    expected = draw_with_all()
    for number, generator in enumerate(generators):
        generator.manual_seed(number)
    found = []
    for _ in range(2):
        numbers, drawn = OwnNumbers(3, GPU), []
        for _ in range(2):
            with numbers.drawn():
                drawn += [torch.rand((), generator=generator).item() for generator in generators[:2]]
        assert len(set(drawn[::2])) == len(set(drawn[1::2])) == 2
        found.append(drawn)
    assert found[0] == found[1], "they begin with the seed, on both devices"
    with fork_rng([GPU, CPU, GPU]):
        torch.rand(7)
        torch.rand(7, generator=generators[1])
    assert draw_with_all() == expected


def test_a_run_on_a_gpu_is_scored_evaluated_asked_and_exported_and_resumed_without_one(
        gpu: PretendGPU, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"train_dir": str(tmp_path), "num_workers": 1, "num_envs_per_worker": 4, "rollout": 16,
                "batch_size": 64, "num_batches_per_epoch": 1, "num_epochs": 1, "serial_mode": True}
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    with APPO("CartPole-v1", **settings, device=DEVICE, eval_every_env_steps=200, eval_episodes=2) as appo:
        appo.train(400)
        newest = appo.predict(obs, deterministic=True)[0].tolist()
        assert appo.versions[0] > 2
    run_dir, shown = tmp_path / "CartPole-v1", []
    for device in ("cpu", DEVICE):
        policy = load(run_dir, checkpoint="latest", device=device)
        assert policy.predict(obs, deterministic=True)[0].tolist() == newest
        assert evaluate.main(["--env=CartPole-v1", f"--train_dir={tmp_path}", f"--device={device}"]) == 0
        shown.append(capsys.readouterr().out)
    assert "playing" in shown[0]
    assert shown[0].splitlines()[-1] == shown[1].splitlines()[-1]
    assert export.main([str(run_dir), str(tmp_path / "policy.pt2")]) == 0
    with APPO("CartPole-v1", **settings, device="cpu") as appo:
        appo.train(100)
    assert "resum" in capsys.readouterr().out
