from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn

from registry.errors import Corrupt, InvalidInput
from session_core.optimizer import Adam, AdamParams


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": nn.Parameter(torch.randn(3, 4, generator=generator)),
        "b": nn.Parameter(torch.randn(5, generator=generator)),
    }


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {
        "a": torch.randn(3, 4, generator=generator),
        "b": torch.randn(5, generator=generator),
    }


PARAMS = AdamParams(learning_rate=0.03, weight_decay=0.1, grad_clip_norm=1.0, eps=1e-8)


def test_it_is_torchs_adamw_with_clipping_to_the_last_bit() -> None:
    mine, theirs = parameters(), parameters()
    adam = Adam(mine)
    reference = torch.optim.AdamW(
        theirs.values(), lr=0.03, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for step in range(5):
        norm = adam.step(gradients(step), PARAMS)
        for name, gradient in gradients(step).items():
            theirs[name].grad = gradient
        expected = nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        reference.step()
        assert norm == pytest.approx(float(expected))
    for name in mine:
        assert torch.equal(mine[name], theirs[name])


def test_a_schedule_lives_with_the_client() -> None:
    mine = parameters()
    before = {name: tensor.detach().clone() for name, tensor in mine.items()}
    adam = Adam(mine)
    adam.step(gradients(0), AdamParams(learning_rate=0.0))
    assert all(torch.equal(mine[name], before[name]) for name in mine)
    adam.step(gradients(1), AdamParams(learning_rate=0.1))
    assert not torch.equal(mine["a"], before["a"])


def test_a_saved_state_continues_to_the_last_bit() -> None:
    whole, first = parameters(), parameters()
    one, two = Adam(whole), Adam(first)
    for step in range(6):
        one.step(gradients(step), PARAMS)
        if step < 3:
            two.step(gradients(step), PARAMS)
    resumed = {name: nn.Parameter(tensor.detach().clone()) for name, tensor in first.items()}
    three = Adam(resumed)
    three.load(two.tensors(), two.steps)
    for step in range(3, 6):
        three.step(gradients(step), PARAMS)
    assert three.steps == 6
    for name in whole:
        assert torch.equal(whole[name], resumed[name])
        assert torch.equal(
            one.tensors()[f"exp_avg_sq.{name}"], three.tensors()[f"exp_avg_sq.{name}"]
        )


def test_the_state_before_the_first_step_is_zeros() -> None:
    adam = Adam(parameters())
    assert set(adam.tensors()) == {"exp_avg.a", "exp_avg.b", "exp_avg_sq.a", "exp_avg_sq.b"}
    assert not any(tensor.any() for tensor in adam.tensors().values())
    other = Adam(parameters())
    other.load(adam.tensors(), 0)
    assert other.steps == 0


def test_no_gradient_is_a_zero_gradient() -> None:
    mine, theirs = parameters(), parameters()
    one, two = Adam(mine), Adam(theirs)
    one.step(gradients(0), PARAMS)
    two.step(gradients(0), PARAMS)
    assert one.step({}, PARAMS) == 0.0
    two.step({name: torch.zeros_like(tensor) for name, tensor in theirs.items()}, PARAMS)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_gradient_that_is_not_finite_takes_no_step() -> None:
    mine = parameters()
    before = mine["a"].detach().clone()
    adam = Adam(mine)
    with pytest.raises(InvalidInput, match="not finite"):
        adam.step({"a": torch.full((3, 4), float("nan"))}, PARAMS)
    assert adam.steps == 0
    assert torch.equal(mine["a"], before)


def test_a_state_of_other_parameters_is_corrupt() -> None:
    adam = Adam(parameters())
    tensors = adam.tensors()
    with pytest.raises(Corrupt, match=r"exp_avg\.b"):
        adam.load({key: value for key, value in tensors.items() if key != "exp_avg.b"}, 1)
    with pytest.raises(Corrupt, match="of b has another shape"):
        adam.load({**tensors, "exp_avg.b": torch.zeros(6)}, 1)


def test_defaults_are_those_of_the_wire() -> None:
    assert AdamParams.read({}) == AdamParams(
        learning_rate=1e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-12,
        weight_decay=0.0,
        grad_clip_norm=0.0,
    )
    assert AdamParams.read({"eps": None}).eps == 1e-12


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"lr": 1}, "Unknown Adam parameters: lr"),
        ({"learning_rate": -1}, "learning_rate must be finite and not negative"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite"),
        ({"learning_rate": "1"}, "learning_rate must be a number"),
        ({"eps": True}, "eps must be a number"),
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
        ({"beta2": float("nan")}, r"beta2 must be in"),
    ],
)
def test_wrong_parameters_are_refused(raw: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        AdamParams.read(raw)


@pytest.mark.parametrize("ratio", [16.0, 0.25])
def test_lora_plus_is_pefts_own_to_the_last_bit(ratio: float) -> None:
    def made() -> PeftModel:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        return get_peft_model(
            layers, LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False)
        )

    mine, theirs = made(), made()
    named = {name: p for name, p in mine.named_parameters() if p.requires_grad}
    adam = Adam(named, lr_ratio=ratio)
    reference = create_loraplus_optimizer(
        theirs,
        torch.optim.AdamW,
        lr=0.03,
        loraplus_lr_ratio=ratio,
        loraplus_weight_decay=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    start = {name: p.detach().clone() for name, p in named.items()}
    generator = torch.Generator().manual_seed(8)
    for _ in range(4):
        step = {name: torch.randn(p.shape, generator=generator) for name, p in named.items()}
        for name, p in theirs.named_parameters():
            p.grad = step.get(name, torch.zeros(0)).clone() if p.requires_grad else None
        adam.step(step, AdamParams(learning_rate=0.03, weight_decay=0.1, eps=1e-8))
        reference.step()
    for name, p in theirs.named_parameters():
        if p.requires_grad:
            assert torch.equal(named[name], p), name
            assert not torch.equal(named[name], start[name])


def test_lora_plus_moves_b_alone_faster() -> None:
    def after(ratio: float) -> dict[str, torch.Tensor]:
        named = {f"x.lora_{side}.weight": nn.Parameter(torch.zeros(3)) for side in "AB"}
        gradient = {name: torch.ones(3) for name in named}
        Adam(named, lr_ratio=ratio).step(gradient, AdamParams(learning_rate=0.01))
        return {name: p.detach() for name, p in named.items()}

    plain, plus = after(1.0), after(8.0)
    assert torch.equal(plain["x.lora_A.weight"], plus["x.lora_A.weight"])
    torch.testing.assert_close(plus["x.lora_B.weight"], plain["x.lora_B.weight"] * 8)
