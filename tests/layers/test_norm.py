import copy
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from recsys.layers.attention import LocalActivation
from recsys.layers.norm import BatchNorm, synchronize_statistics


@pytest.mark.parametrize("affine", [True, False])
def test_outputs_gradients_and_running_statistics_equal_batch_norm_1d(rng, affine):
    ours = BatchNorm(4, affine=affine, eps=1e-3, momentum=0.3)
    theirs = nn.BatchNorm1d(4, affine=affine, eps=1e-3, momentum=0.3)
    for _ in range(3):
        x = (3 + 2 * torch.randn(9, 4, generator=rng)).requires_grad_()
        weight = torch.randn(9, 4, generator=rng)
        out, expected = ours(x), theirs(x)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad((out * weight).sum(), (x, *ours.parameters())),
            torch.autograd.grad((expected * weight).sum(), (x, *theirs.parameters())),
        )
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_states_have_the_names_of_batch_norm_1d():
    assert set(nn.BatchNorm1d(2).state_dict()) - set(BatchNorm(2).state_dict()) == {"num_batches_tracked"}
    assert set(BatchNorm(2).state_dict()) <= set(nn.BatchNorm1d(2).state_dict())


@pytest.mark.parametrize("num_rows", [0, 1])
def test_too_few_rows_use_the_running_statistics_and_leave_them(rng, num_rows):
    norm = BatchNorm(3)
    norm(torch.randn(10, 3, generator=rng))
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(num_rows, 3, generator=rng)
    in_training = norm(x)
    torch.testing.assert_close(in_training, norm.eval()(x))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


# Rows of the two ranks: unequal, one without rows, one with one row, one row in all, none at all.
SPLITS = [(5, 3), (7, 0), (0, 7), (2, 1), (1, 0), (0, 0)]
EVENTS = ([3, 0, 2], [0, 0])  # history lengths of the rows of each rank: the second has no event at all


def norm_case(split):
    generator = torch.Generator().manual_seed(sum(split))
    x = 3 + 2 * torch.randn(sum(split), 4, generator=generator)
    return x, torch.randn(sum(split), 4, generator=generator)


def far_from_zero():
    return (1000 + torch.randn(2, 50, 4, generator=torch.Generator().manual_seed(1))).unbind()


def attention_case():
    generator = torch.Generator().manual_seed(5)
    unit = LocalActivation(3, (4, 2))
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.normal_(generator=generator)
    lengths = [length for rank in EVENTS for length in rank]
    draw = [torch.randn(n, 3, generator=generator) for n in (len(lengths), sum(lengths), len(lengths))]
    return unit, torch.tensor(lengths), draw


def two_steps(norm, x, weight):
    """Outputs and input gradients of two training steps, then the gradients of the parameters."""
    results = []
    for factor in (1.0, 2.0):
        leaf = (factor * x).requires_grad_()
        out = norm(leaf)
        (out * weight).sum().backward()
        results += [out.detach(), leaf.grad]
    return results, [parameter.grad for parameter in norm.parameters()]


def attention_step(unit, query, keys, lengths, weight):
    query, keys = query.clone().requires_grad_(), keys.clone().requires_grad_()
    out = unit(query, keys, lengths)
    (out * weight).sum().backward()
    return [out.detach(), query.grad], [parameter.grad for parameter in unit.parameters()]


def _on_one_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = []
    for split in SPLITS:
        norm = BatchNorm(4, momentum=0.3)
        synchronize_statistics(norm, dist.group.WORLD)
        rows = slice(0, split[0]) if rank == 0 else slice(split[0], None)
        by_row, by_parameter = two_steps(norm, *(tensor[rows] for tensor in norm_case(split)))
        norm.eval()(torch.zeros(rank, 4))  # evaluation is no collective: ranks may differ in batches
        found.append((by_row, by_parameter, list(norm.buffers())))
    far = BatchNorm(4, momentum=1.0)
    synchronize_statistics(far, dist.group.WORLD)
    far(far_from_zero()[rank])
    found.append(far.running_var)
    unit, lengths, (query, keys, weight) = attention_case()
    synchronize_statistics(unit, dist.group.WORLD)
    first, events = len(EVENTS[0]), sum(EVENTS[0])
    rows, places = (slice(0, first), slice(0, events)) if rank == 0 else (slice(first, None), slice(events, None))
    by_row, by_parameter = attention_step(unit, query[rows], keys[places], lengths[rows], weight[rows])
    found.append((by_row, by_parameter, list(unit.buffers())))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.spawn(_on_one_rank, args=(str(folder),), nprocs=2, join=False)
    end_s = time.monotonic() + 90
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end_s, "the two ranks hang"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_ranks_equal(ranks, expected):
    """Rows side by side, parameter gradients summed over ranks, the same buffers on both."""
    by_row, by_parameter, buffers = expected
    both = list(zip(*ranks, strict=True))
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close([torch.cat(pair) for pair in zip(*both[0], strict=True)], by_row, **close)
    torch.testing.assert_close([a + b for a, b in zip(*both[1], strict=True)], by_parameter, **close)
    for found in both[2]:
        torch.testing.assert_close(found, buffers, **close)


@pytest.mark.dist
@pytest.mark.parametrize("case", range(len(SPLITS)), ids=map(str, SPLITS))
def test_two_ranks_equal_one_process_on_all_rows(two_ranks, case):
    x, weight = norm_case(SPLITS[case])
    # torch's own layer in float64 is the reference, except that it refuses fewer than two rows.
    enough = sum(SPLITS[case]) >= 2
    norm = nn.BatchNorm1d(4, momentum=0.3).double() if enough else BatchNorm(4, momentum=0.3).double()
    by_row, by_parameter = two_steps(norm, x.double(), weight.double())
    buffers = [norm.running_mean, norm.running_var]
    as_float = [[tensor.float() for tensor in tensors] for tensors in (by_row, by_parameter, buffers)]
    assert_ranks_equal([ranks[case] for ranks in two_ranks], as_float)


@pytest.mark.dist
def test_a_mean_far_from_zero_does_not_drown_the_variance(two_ranks):
    expected = torch.cat(far_from_zero()).double().var(0).float()
    for ranks in two_ranks:
        torch.testing.assert_close(ranks[-2], expected, rtol=1e-4, atol=0)


@pytest.mark.dist
def test_attention_on_a_rank_without_events_equals_one_process_on_all_rows(two_ranks):
    unit, lengths, (query, keys, weight) = attention_case()
    by_row, by_parameter = attention_step(unit, query, keys, lengths, weight)
    assert_ranks_equal([ranks[-1] for ranks in two_ranks], (by_row, by_parameter, list(unit.buffers())))
