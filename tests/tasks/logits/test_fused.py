from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.logits import fused
from tasks.logits.fused import fused_loss
from tasks.logits.heads import Head
from tasks.losses import cross_entropy, forward_kl, reverse_kl
from tests.ranks import run_ranks
from tests.tasks.logits.fused_runs import CASES, plain_weights, run_fused
from tests.tasks.task_runs import SHARED, STEPS

N, V, H, WIDE = 7, 13, 6, 9  # rows, logits, student's and teacher's width
FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.25},
    "softcap": {"softcap": 2.0},
    "all": {"bias": True, "scale": 3.0, "softcap": 1.5, "vocabulary": 11},
    "cut": {"vocabulary": 11},
}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_head(width: int, *, seed: int, dtype: torch.dtype = torch.float64, bias: bool = False, **options: Any) -> Head:
    return Head(
        weight=draw(V, width, seed=seed, dtype=dtype).requires_grad_(),
        bias=draw(V, seed=seed + 1, dtype=dtype).requires_grad_() if bias else None,
        **options,
    )


def textbook_logits(hidden: Tensor, head: Head) -> Tensor:
    """The formula, by plain autograd, over the whole vocabulary."""
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return logits[:, : head.vocabulary]


def textbook_loss(student: Tensor, teacher: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """0.7 of a forward KL at temperature 2, 0.2 of a reverse KL over some rows, and a cross-entropy."""
    log_q, log_p = torch.log_softmax(student / 2, -1), torch.log_softmax(teacher / 2, -1)
    forward = 4 * (log_p.exp() * (log_p - log_q)).sum()
    log_q, log_p = torch.log_softmax(student, -1)[mask], torch.log_softmax(teacher, -1)[mask]
    reverse = (log_q.exp() * (log_q - log_p)).sum()
    entropy = F.cross_entropy(student, labels, reduction="sum")
    sums = torch.stack([forward, reverse, entropy])
    return (sums * sums.new_tensor([0.7, 0.2, 1.0])).sum(), sums.detach()


def tile_loss(teacher: Callable[[slice], Tensor], labels: Tensor, mask: Tensor) -> fused.TileLoss:
    def loss(student: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        signal, counted = teacher(rows).float(), mask[rows]
        terms = [
            forward_kl(student, signal, temperature=2.0).sum(),
            reverse_kl(student[counted], signal[counted]).sum(),
            cross_entropy(student, labels[rows]).sum(),
        ]
        return 0.7 * terms[0] + 0.2 * terms[1] + terms[2], torch.stack(terms).detach()

    return loss


def leaves(hidden: Tensor, head: Head) -> list[Tensor]:
    return [value for value in (hidden, head.weight, head.bias) if value is not None]


LABELS = torch.tensor([3, 0, 10, 5, 5, 2, 9])
MASK = torch.tensor([True, False, True, True, False, False, True])


@pytest.mark.parametrize("rows_per_tile", [1, 3, N, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_value_and_gradients_are_those_of_the_dense_form(family: str, rows_per_tile: int) -> None:
    student, teacher = make_head(H, seed=0, **FAMILIES[family]), make_head(WIDE, seed=10, **FAMILIES[family])
    hidden, wide = draw(N, H, seed=20).requires_grad_(), draw(N, WIDE, seed=21)
    objective, sums = textbook_loss(
        textbook_logits(hidden, student), textbook_logits(wide, teacher).detach(), LABELS, MASK
    )
    expected = torch.autograd.grad(3 * objective, leaves(hidden, student))

    fixed = teacher.detached()
    fused, fused_sums = fused_loss(
        hidden,
        student,
        tile_loss(lambda rows: fixed.logits(wide[rows]), LABELS, MASK),
        tile_rows=rows_per_tile,
    )
    found = torch.autograd.grad(3 * fused, leaves(hidden, student))

    torch.testing.assert_close(fused, objective, rtol=1e-5, atol=1e-5, check_dtype=False)  # the losses are float32
    torch.testing.assert_close(fused_sums, sums, rtol=1e-5, atol=1e-5, check_dtype=False)
    assert not fused_sums.requires_grad
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)


def plain_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """A loss that is float64 all the way."""
    losses = torch.logsumexp(logits, -1) - logits.gather(-1, LABELS[rows].unsqueeze(-1)).squeeze(-1)
    return losses.sum(), losses.detach().sum().reshape(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float64_it_is_exact(family: str) -> None:
    head, hidden = make_head(H, seed=0, **FAMILIES[family]), draw(N, H, seed=20).requires_grad_()
    expected = torch.autograd.grad(plain_loss(textbook_logits(hidden, head), slice(None))[0], leaves(hidden, head))

    found = torch.autograd.grad(fused_loss(hidden, head, plain_loss, tile_rows=2)[0], leaves(hidden, head))

    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12)


def test_a_tied_weight_gets_both_gradients() -> None:
    weight, tokens = draw(V, H, seed=0).requires_grad_(), torch.tensor([1, 5, 0, 2, 2, 12, 7])
    (expected,) = torch.autograd.grad(plain_loss(torch.tanh(weight[tokens]) @ weight.T, slice(None))[0], weight)

    fused = fused_loss(torch.tanh(weight[tokens]), Head(weight=weight), plain_loss, tile_rows=2)[0]

    torch.testing.assert_close(torch.autograd.grad(fused, weight)[0], expected, rtol=1e-12, atol=1e-12)


def test_of_no_row_comes_a_zero_with_a_graph_and_gradients_of_zero() -> None:
    head, hidden = make_head(H, seed=0, bias=True), draw(0, H, seed=1).requires_grad_()

    objective, sums = fused_loss(hidden, head, tile_loss(lambda rows: hidden.new_zeros(0, V), LABELS[:0], MASK[:0]))
    objective.backward()  # type: ignore[no-untyped-call]

    assert objective == 0
    assert sums.tolist() == [0, 0, 0]
    assert [tuple(value.grad.shape) for value in leaves(hidden, head) if value.grad is not None] == [
        (0, H),
        (V, H),
        (V,),
    ]
    assert all(not value.grad.any() for value in leaves(hidden, head) if value.grad is not None)


def test_a_frozen_head_gets_no_gradient_and_frozen_hidden_states_neither() -> None:
    head, hidden = make_head(H, seed=0), draw(N, H, seed=20)
    (of_hidden,) = torch.autograd.grad(fused_loss(hidden.clone().requires_grad_(), head, plain_loss)[0], head.weight)

    with mock.patch.object(fused, "_add_outer", side_effect=AssertionError("the weight is frozen")):
        leaf = hidden.clone().requires_grad_()
        fused_loss(leaf, head.detached(), plain_loss)[0].backward()  # type: ignore[no-untyped-call]
    with mock.patch.object(fused, "_add_product", side_effect=AssertionError("the states want no gradient")):
        (alone,) = torch.autograd.grad(fused_loss(hidden, head, plain_loss)[0], head.weight)

    assert leaf.grad is not None
    assert leaf.grad.any()
    assert torch.equal(alone, of_hidden)


def test_without_grad_mode_only_the_sums_are_computed() -> None:
    head, hidden = make_head(H, seed=0), draw(N, H, seed=20).requires_grad_()

    with (
        torch.no_grad(),
        mock.patch.object(fused.Gradients, "add", side_effect=AssertionError("no gradient")),
    ):
        objective, sums = fused_loss(hidden, head, plain_loss, tile_rows=1)

    assert not objective.requires_grad
    torch.testing.assert_close(sums, plain_loss(textbook_logits(hidden, head), slice(None))[1])


def test_a_second_backward_is_refused() -> None:
    head, hidden = make_head(H, seed=0), draw(N, H, seed=20)
    objective, _ = fused_loss(hidden, head, plain_loss)
    objective.backward(retain_graph=True)  # type: ignore[no-untyped-call]

    with pytest.raises(RuntimeError, match="a second time"):
        objective.backward()  # type: ignore[no-untyped-call]


def relative(value: Tensor, right: Tensor) -> float:
    return float((value.double() - right).norm() / right.norm())


@pytest.mark.parametrize("vocabulary", [1_000, 49_152, 151_936])
def test_a_tile_has_fewer_rows_of_a_larger_vocabulary(vocabulary: int) -> None:
    head, tiles = Head(weight=torch.ones(vocabulary, 1)), []

    def loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        tiles.append(logits.numel())
        return logits[:, 0].sum(), logits.new_zeros(1)

    with torch.no_grad():
        fused_loss(torch.ones(400, 1), head, loss)

    assert sum(tiles) == 400 * vocabulary
    assert max(tiles) <= fused.CPU_TILE
    assert len(tiles) == 1 or tiles[0] > fused.CPU_TILE - vocabulary


def long_case(dtype: torch.dtype, *, rows: int = 2048) -> tuple[Tensor, Head, fused.TileLoss, list[Tensor]]:
    """Returns a case of many rows, and its gradients by float64."""
    labels = torch.randint(0, 64, (rows,), generator=torch.Generator().manual_seed(5))
    head = Head(weight=draw(64, 32, seed=1, dtype=dtype).requires_grad_())
    hidden = draw(rows, 32, seed=2, dtype=dtype).requires_grad_()

    def loss(logits: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(logits, labels[part], reduction="sum"), logits.new_zeros(1)

    exact = [hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()]
    expected = torch.autograd.grad(loss(exact[0] @ exact[1].T, slice(None))[0], exact)
    return hidden, head, loss, list(expected)


def test_bfloat16_adds_up_in_float32_however_small_the_tiles() -> None:
    hidden, head, loss, (of_hidden, of_weight) = long_case(torch.bfloat16)
    rounding = relative(of_weight.bfloat16(), of_weight)  # 2 ** -9: what storing the right gradient costs

    found = {
        rows: torch.autograd.grad(fused_loss(hidden, head, loss, tile_rows=rows)[0], [hidden, head.weight])
        for rows in (1, 16, 2048)
    }
    naive = torch.zeros(64, 32, dtype=torch.bfloat16)
    for rows in fused.parts(2048, 16):
        naive += torch.autograd.grad(loss(hidden[rows].detach() @ head.weight.T, rows)[0], head.weight)[0]

    errors = {rows: relative(weight, of_weight) for rows, (_, weight) in found.items()}
    assert max(errors.values()) < 4 * rounding
    assert max(errors.values()) < 1.2 * min(errors.values())  # not more with more tiles
    assert relative(naive, of_weight) > 2 * max(errors.values())
    assert all(relative(gradient, of_hidden) < 0.01 for gradient, _ in found.values())


def test_half_precision_in_blocks_is_as_good() -> None:
    """The products of a GPU's bfloat16 weight, and of float16, go block by block."""
    gradient, hidden = draw(40, 64, seed=3, dtype=torch.float32), draw(40, 32, seed=4, dtype=torch.float16)
    weight = draw(64, 32, seed=5, dtype=torch.float16)
    total, outer = torch.zeros(40, 32), torch.zeros(64, 32)

    with mock.patch.object(fused, "BLOCK", 10 * 32):
        fused._add_product(total, gradient * 1e-9, weight)
    fused._add_outer(outer, gradient * 1e-9, hidden)

    # Gradients that float16 would round to zero before the loss scale comes.
    assert relative(total, gradient.double() @ weight.double() * 1e-9) < 1e-6
    assert relative(outer, gradient.double().T @ hidden.double() * 1e-9) < 1e-6


def test_under_autocast_the_product_is_as_the_model_computes_it_and_the_sums_are_float32() -> None:
    hidden, head, loss, (of_hidden, of_weight) = long_case(torch.float32, rows=64)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        objective, _ = fused_loss(hidden, head, loss, tile_rows=16)
        dense = loss(F.linear(hidden, head.weight).float(), slice(None))[0]
    gradients = torch.autograd.grad(objective, [hidden, head.weight])

    torch.testing.assert_close(objective, dense)
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32]
    assert relative(gradients[0], of_hidden) < 0.01
    assert relative(gradients[1], of_weight) < 0.01


def test_no_tile_has_more_rows_than_asked_for() -> None:
    head, hidden = make_head(H, seed=0), draw(N, H, seed=20).requires_grad_()
    shapes = []

    def loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(logits.shape))
        return plain_loss(logits, rows)

    fused_loss(hidden, head, loss, tile_rows=2)
    fused_loss(hidden, replace(head, vocabulary=11), loss, tile_rows=3)
    fused_loss(hidden, head, loss, tile_rows=1)

    assert shapes == [(2, V)] * 3 + [(1, V)] + [(3, 11)] * 2 + [(1, 11)] + [(1, V)] * N


# Through real engines


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found in every case."""
    folder = tmp_path_factory.mktemp("fused")
    return run_ranks(run_fused, request.param, folder, folder=folder, world_size=request.param)


@pytest.mark.parametrize("case", CASES)
def test_training_through_engines_equals_plain_pytorch(ranks: list[dict[str, Any]], case: str) -> None:
    stage, plugin, kind = CASES[case]
    found = ranks[0][case]

    teacher = ("DeepSpeedEngine", 3) if "zero_optimization" in plugin else ("LlamaForCausalLM", None)
    assert found["engines"] == {"student": ("DeepSpeedEngine", stage), "teacher": teacher}
    assert found["reasons"] == [None, None]
    for name, value in plain_weights(kind).items():
        torch.testing.assert_close(found["weights"]["student"][name].double(), value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_a_sharded_head_is_gathered_once_per_micro_batch_whatever_its_tiles(
    ranks: list[dict[str, Any]], case: str
) -> None:
    stage, plugin, kind = CASES[case]
    num_batches = STEPS * SHARED // len(ranks)
    expected = {"teacher": num_batches} if "zero_optimization" in plugin else {}
    if stage == 3:  # the first time, DeepSpeed does not know yet that a tied weight is about to be used again
        expected["student"] = num_batches + (kind == "tied")

    assert [rank[case]["gathers"] for rank in ranks] == [expected] * len(ranks)


def test_some_micro_batches_counted_no_token(ranks: list[dict[str, Any]]) -> None:
    assert all(rank[case]["empty"] > 0 for rank in ranks for case in CASES)
