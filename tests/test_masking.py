"""The formulas that make CAMEL, against values worked out by hand. The scripts share them word for word."""

import camel_td3 as camel
import numpy as np
import pytest
import torch
from torch import tensor

LOW, HIGH = tensor([-1.0, 0.0, -0.4]), tensor([1.0, 1.0, 0.4])


def close(a, b):
    return torch.allclose(torch.as_tensor(a), tensor(b), atol=1e-6)


def test_box_of_asymmetric_bounds():
    box_low, box_high = camel.action_box(tensor([0.9, 0.5, -0.4]), 1.0, LOW, HIGH, 0.2)
    assert close(box_low, [0.7, 0.4, -0.4])  # half-widths 0.2, 0.1, 0.08, cut off at the bounds
    assert close(box_high, [1.0, 0.6, -0.32])


def test_box_opens_with_the_strength():
    prior = tensor([[0.0, 0.5, 0.0]] * 3)
    box_low, box_high = camel.action_box(prior, tensor([[0.0], [0.5], [1.0]]), LOW, HIGH, 0.2)
    assert torch.equal(box_low[0], LOW) and torch.equal(box_high[0], HIGH)  # to the last bit
    assert close(box_low[1], [-0.6, 0.2, -0.24]) and close(box_high[1], [0.6, 0.8, 0.24])
    assert close(box_low[2], [-0.2, 0.4, -0.08]) and close(box_high[2], [0.2, 0.6, 0.08])


def test_box_without_a_prior_is_the_whole_space():
    box_low, box_high = camel.action_box(torch.zeros(5, 0), 1.0, LOW, HIGH, 0.2)
    assert torch.equal(box_low, LOW) and torch.equal(box_high, HIGH)


def test_box_never_leaves_the_action_space():
    generator = torch.Generator().manual_seed(0)
    low, high = tensor([-0.3, 0.1, -0.7]), tensor([0.7, 0.3, 0.9])
    prior = low + torch.rand(20000, 3, generator=generator) * (high - low)
    box_low, box_high = camel.action_box(prior, torch.rand(20000, 1, generator=generator), low, high, 0.2)
    assert (low <= box_low).all() and (box_low <= box_high).all() and (box_high <= high).all()


def test_projection_and_its_inverted_gradient():
    box = tensor([-0.5] * 5), tensor([0.5] * 5)
    # Above, below and inside the box, with a descent step that leads out or in.
    action = tensor([0.9, 0.9, -0.9, -0.9, 0.1], requires_grad=True)
    gradient = tensor([-2.0, 3.0, 2.0, -3.0, 5.0])
    projected = camel.mask_action(action, box, tensor(-1.0), tensor(1.0), "project")
    projected.backward(gradient)
    assert torch.equal(projected, tensor([0.5, 0.5, -0.5, -0.5, 0.1]))
    assert torch.equal(action.grad, tensor([2.0, 3.0, -2.0, -3.0, 5.0]))


def test_an_output_outside_comes_in():
    box = tensor([-0.5]), tensor([0.5])
    for best, end in ((0.2, 0.2), (0.8, 0.5)):  # the best action is inside; it is beyond the edge
        output = tensor([0.9], requires_grad=True)
        for _ in range(2000):
            action = camel.mask_action(output, box, tensor(-1.0), tensor(1.0), "project")
            (gradient,) = torch.autograd.grad(((action - best) ** 2).sum(), output)
            output = (output - 0.005 * gradient).detach().requires_grad_()
        assert abs(output.item() - end) < 0.005


def test_affine_mapping():
    box = tensor([0.2, 0.4, -0.4]), tensor([0.6, 0.6, 0.0])
    outputs = torch.stack([LOW, (LOW + HIGH) / 2, HIGH])
    actions = camel.mask_action(outputs, box, LOW, HIGH, "affine")
    assert close(actions, [[0.2, 0.4, -0.4], [0.4, 0.5, -0.2], [0.6, 0.6, 0.0]])


def test_strength_in_the_three_ways_of_masking():
    generator = torch.Generator().manual_seed(0)
    assert camel.mask_strength(0.3, "anneal", generator, 4, 1) == 0.3
    for masking in ("step", "episode"):
        draws = camel.mask_strength(0.3, masking, generator, 20000, 1)
        assert draws.shape == (20000, 1) and set(draws.unique().tolist()) == {0.0, 1.0}
        assert abs(draws.mean().item() - 0.3) < 0.015  # five standard errors
        assert camel.mask_strength(0.0, masking, generator, 1000).sum() == 0
        assert camel.mask_strength(1.0, masking, generator, 1000).sum() == 1000


def test_linear_schedule():
    args = camel.Args(total_timesteps=1100, learning_starts=100, epsilon_start=0.8, epsilon_fraction=0.5)
    values = [camel.linear_epsilon(step, args) for step in (0, 99, 100, 350, 600, 1099)]
    assert values == pytest.approx([0.8, 0.8, 0.8, 0.4, 0.0, 0.0])
    warm_up_only = camel.Args(total_timesteps=1100, learning_starts=100, epsilon_fraction=0.0)
    assert [camel.linear_epsilon(step, warm_up_only) for step in (99, 100, 101)] == [1.0, 1.0, 0.0]


def test_adaptive_schedule():
    args = camel.Args(total_timesteps=1100, learning_starts=100, epsilon_start=1.0, epsilon_fraction=0.5)
    hundred = [100.0] * 4  # in the warm-up; episodes of 25 steps
    good = camel.adaptive_epsilon(0.5, 90.0, 50, hundred, args)  # 50 of 500 steps
    bad = camel.adaptive_epsilon(0.5, 89.9, 5, hundred, args)  # 4 * 25 of 500 steps, however short it was
    assert (good, bad) == pytest.approx((0.4, 0.7))
    assert camel.adaptive_epsilon(0.05, 200.0, 50, hundred, args) == 0.0
    assert camel.adaptive_epsilon(0.9, 0.0, 50, hundred, args) == 1.0
    # A warm-up that scores -100 is matched by -110, not by -111.
    assert camel.adaptive_epsilon(0.5, -110.0, 50, [-100.0] * 4, args) == pytest.approx(0.4)
    assert camel.adaptive_epsilon(0.5, -111.0, 50, [-100.0] * 4, args) == pytest.approx(0.7)
    # Returns that vary by more than 10 %: their mean is 100, their standard deviation 50.
    assert camel.adaptive_epsilon(0.5, 0.0, 50, [50.0, 150.0], args) == pytest.approx(0.4)
    assert camel.adaptive_epsilon(0.5, -0.1, 50, [50.0, 150.0], args) == pytest.approx(0.9)


def test_adaptive_schedule_is_the_linear_one_if_every_episode_is_good():
    args = camel.Args(total_timesteps=1100, learning_starts=100, epsilon_start=0.8, epsilon_fraction=0.5)
    epsilon = args.epsilon_start
    for episode_end in range(150, 1100, 50):
        epsilon = camel.adaptive_epsilon(epsilon, 1.0, 50, [0.0], args)
        assert epsilon == pytest.approx(camel.linear_epsilon(episode_end, args))


@pytest.mark.parametrize(
    "env_id, name",
    [
        ("Hopper-v4", "hopper_v4.py"),
        ("HalfCheetah-v4", "half_cheetah_v4.py"),
        ("Walker2d-v4", "walker2d_v4.py"),
        ("Reach-v0", "reach_v0.py"),
    ],
)
def test_default_policy_file(env_id, name):
    assert camel.default_policy_file(env_id).name == name
    assert camel.default_policy_file(env_id).parent.name == "llm_policies"


def test_projection_is_exact_at_strength_zero():
    """An output inside the whole space is its own projection, and so is its gradient."""
    action = (torch.rand(1000, 3) * (HIGH - LOW) + LOW).requires_grad_()
    box = camel.action_box(torch.zeros(1000, 3), 0.0, LOW, HIGH, 0.2)
    gradient = torch.randn(1000, 3)
    projected = camel.mask_action(action, box, LOW, HIGH, "project")
    projected.backward(gradient)
    assert np.array_equal(projected.detach(), action.detach()) and torch.equal(action.grad, gradient)
