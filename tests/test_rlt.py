"""What is particular to RLT: sizes, the window's meaning, sharing of weights."""

from typing import Any

import pytest
import torch

import crosscurrent as cc
from tests.subjects import cache_of, largest_difference, make_rlt, token_ids


def count(**settings: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in cc.RLTForCausalLM(cc.RLTConfig(**settings)).parameters())


def test_published_parameter_counts() -> None:
    assert count(feedback_interval=None) == 27_938_944
    splits: dict[tuple[int, int], float] = {(4, 4): 28.73, (5, 3): 28.20, (6, 2): 27.68, (7, 1): 27.15, (8, 0): 26.10}
    for (encoder, decoder), millions in splits.items():
        sizes: Any = {"num_encoder_layers": encoder, "num_decoder_layers": decoder}
        assert round(count(**sizes) / 1e6, 2) == millions
        assert count(**sizes) - count(**sizes, feedback_interval=None) == 787_968
        assert count(**sizes, feedback_interval=8) == count(**sizes)
    assert round(count(num_encoder_layers=8, num_decoder_layers=0, feedback_interval=None) / 1e6, 2) == 25.31


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("solver", [cc.Sequential(), cc.Jacobi(12, 1)], ids=lambda solver: solver.name)
def test_window_counts_the_current_token(window: int, solver: Any) -> None:
    """With every other path closed, the last token sees token i exactly if it is at most window - 1 tokens back."""
    model = make_rlt(num_decoder_layers=1, feedback_interval=None, sliding_window=window)
    with torch.no_grad():
        for layer in model.model.encoder:
            layer.self_attn.o_proj.weight.zero_()
        model.model.decoder.layers[0].memory_attn.o_proj.weight.zero_()
    embeddings = torch.randn(1, 9, 16, dtype=torch.float64, requires_grad=True)
    model(inputs_embeds=embeddings, solver=solver).logits[0, -1].sum().backward()
    assert embeddings.grad is not None
    reached = (embeddings.grad[0].abs().sum(-1) > 0).tolist()
    assert reached == [i >= 9 - window for i in range(9)]


def test_tied_layers_share_weights_and_gradients() -> None:
    model = make_rlt(tie_encoder_decoder=True)
    encoder, decoder = model.model.encoder[0], model.model.decoder.layers[0]
    assert decoder.self_attn.q_proj.weight is encoder.self_attn.q_proj.weight
    assert decoder.mlp.down_proj.weight is encoder.mlp.down_proj.weight
    assert decoder.self_attn.q_norm.weight is not encoder.self_attn.q_norm.weight
    untied = make_rlt()
    shared = 2 * (4 * 16 * 16 + 3 * 16 * 24)
    assert model.num_parameters() == untied.num_parameters() - shared


def test_memory_groups_serve_layers_in_order() -> None:
    model = make_rlt(num_decoder_layers=5, num_memory_groups=2)
    assert [model.model.decoder.memory_group(index) for index in range(5)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_encoders_window_counts_the_current_token(window: int) -> None:
    """Without a decoder and feedback, the last token sees token i exactly if it is at most window - 1 tokens back."""
    model = make_rlt(num_encoder_layers=1, num_decoder_layers=0, feedback_interval=None, encoder_sliding_window=window)
    embeds = torch.randn(1, 9, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embeds).logits[0, -1].sum(), embeds)
    reached = gradient[0].abs().sum(dim=-1) > 0
    assert reached.tolist() == [i >= 9 - window for i in range(9)]
    with pytest.raises(ValueError, match="encoder_sliding_window=0"):
        cc.RLTConfig(encoder_sliding_window=0)


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("solver", [cc.Sequential(), cc.Jacobi(12, 1)], ids=lambda solver: solver.name)
def test_the_memorys_window_counts_the_current_token(window: int, solver: Any) -> None:
    """With every other path closed, the last token sees token i exactly if it is at most window - 1 tokens back."""
    model = make_rlt(num_decoder_layers=1, feedback_interval=None, sliding_window=1, memory_sliding_window=window)
    with torch.no_grad():
        for layer in model.model.encoder:
            layer.self_attn.o_proj.weight.zero_()
    embeds = torch.randn(1, 9, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embeds, solver=solver).logits[0, -1].sum(), embeds)
    reached = gradient[0].abs().sum(dim=-1) > 0
    assert reached.tolist() == [i >= 9 - window for i in range(9)]
    with pytest.raises(ValueError, match="memory_sliding_window=0"):
        cc.RLTConfig(memory_sliding_window=0)


def test_the_window_kept_is_as_short_as_can_be() -> None:
    model = make_rlt(sliding_window=4)
    for mask in (None, torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1]])):
        cache = cache_of(model(token_ids(1, 9), attention_mask=mask, use_cache=True))
        assert cache.window.keys[0].shape[2] == 3 and cache.window.labels.tolist() == [[0, 0, 0]]


def test_positions_that_differ_from_its_own_are_refused() -> None:
    with pytest.raises(ValueError, match="position_ids differ"):
        make_rlt()(token_ids(1, 3), position_ids=torch.tensor([[5, 6, 7]]))


def test_truncation_changes_gradients_only() -> None:
    model, ids = make_rlt(), token_ids(2, 9)
    whole, cut = model(ids, labels=ids), model(ids, labels=ids, solver=cc.Sequential(truncate=4))
    assert torch.equal(whole.logits, cut.logits)
    weight = model.model.merge.state_projection.weight
    full, short = (torch.autograd.grad(output.loss, weight)[0] for output in (whole, cut))
    assert largest_difference(full, short) > 1e-8


def test_truncation_cuts_exactly_where_it_says() -> None:
    """The loss on tokens of one segment equals, in gradient, that segment run from a detached cache."""
    model, ids = make_rlt(num_encoder_layers=1), token_ids(1, 8)
    labels = ids.clone()
    labels[:, :5] = -100
    with torch.no_grad():
        model.model.encoder[0].self_attn.o_proj.weight.zero_()
        for layer in model.model.decoder.layers:
            layer.memory_attn.o_proj.weight.zero_()
    weight = model.model.merge.state_projection.weight
    cut = torch.autograd.grad(model(ids, labels=labels, solver=cc.Sequential(truncate=4)).loss, weight)[0]
    with torch.no_grad():
        cache = cache_of(model(ids[:, :4], use_cache=True))
    expected = torch.autograd.grad(model(ids[:, 4:], labels=ids[:, 4:], cache=cache).loss, weight)[0]
    assert largest_difference(cut, expected) < 1e-12


def test_noise_on_the_state_is_for_training_alone() -> None:
    plain, noisy = make_rlt(), make_rlt(state_noise=0.5)
    ids = token_ids(2, 7)
    assert torch.equal(plain.eval()(ids).logits, noisy.eval()(ids).logits)
    noisy.train()
    torch.manual_seed(3)
    first, second = noisy(ids).logits, noisy(ids).logits
    torch.manual_seed(3)
    assert torch.equal(noisy(ids).logits, first) and not torch.equal(first, second)
    exact = plain(ids).logits
    assert torch.allclose(first[:, 0], exact[:, 0], atol=1e-12)  # nothing carried is read there
    assert (first[:, 1:] - exact[:, 1:]).abs().amin(dim=-1).min() > 0


def test_noise_is_a_share_of_the_states_size() -> None:
    """The first token's state, as the second reads it, differs by a noise of the given size."""
    model = make_rlt(state_noise=0.25).train()
    read: list[torch.Tensor] = []
    assert model.model.merge is not None
    model.model.merge.norm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model(token_ids(1, 2).expand(4000, 2))
    noise = read[1][:, 0] - read[1][:, 0].mean(dim=0)
    size = read[1][:, 0].mean(dim=0).square().mean().sqrt()
    assert noise.std().item() == pytest.approx(0.25 * size.item(), rel=0.02)


def test_noise_is_the_same_where_activations_are_computed_again() -> None:
    gradients = []
    for solver in (cc.Sequential(), cc.Sequential(recompute_every=3)):
        model = make_rlt(state_noise=0.5).train()
        torch.manual_seed(4)
        ids = token_ids(2, 8)
        model(ids, labels=ids, solver=solver).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_noise_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state_noise=-0\.1"):
        cc.RLTConfig(state_noise=-0.1)
    several: tuple[Any, ...] = (None, "0.1", True)
    for strange in several:
        with pytest.raises(ValueError, match=r"state_noise=.* is not allowed"):
            cc.RLTConfig(state_noise=strange)
    with pytest.raises(ValueError, match=r"state_noise=0\.1 has no effect without feedback"):
        cc.RLTConfig(state_noise=0.1, feedback_interval=None)
    model = make_rlt(state_noise=0.1)
    ids = token_ids(1, 5)
    model.eval()(ids, solver=cc.Jacobi(5))
    with pytest.raises(ValueError, match=r"state_noise=0\.1 needs the solver Sequential"):
        model.train()(ids, solver=cc.Jacobi(5))


WINDOWED: dict[str, Any] = {"encoder_sliding_window": 4, "memory_sliding_window": 1, "sliding_window": 3}


def held(cache: Any) -> list[int]:
    """Of how many tokens each layer still has keys."""
    return [layer.keys.shape[2] for layer in cache.layers]


@pytest.mark.parametrize("changes", [{}, {"feedback_interval": None}, {"num_decoder_layers": 0}], ids=str)
def test_a_cache_keeps_no_more_than_windows_see(changes: dict[str, Any]) -> None:
    model, ids = make_rlt(**WINDOWED | changes), token_ids(2, 40)
    whole = model(ids, use_cache=False).logits
    cache, logits, sizes = model.new_cache(), [], (7, 1, 13, 2, 1, 1, 1, 1, 1, 12)
    for part in ids.split(sizes, dim=1):
        logits.append(model(part, cache=cache).logits)
        assert max(held(cache)[:2]) <= 6 and max(held(cache)[2:], default=0) == 0
    assert largest_difference(torch.cat(logits, dim=1), whole) < 1e-12
    assert cache.get_seq_length() == 40 and cache.key_labels is not None
    assert cache.key_labels.untyped_storage().nbytes() < 40 * 8


def test_what_a_cache_dropped_is_not_missed() -> None:
    """Padding, another document and tokens taken back, behind a beginning of which little is left."""
    model, ids = make_rlt(**WINDOWED), token_ids(2, 40)
    mask = torch.tensor([[1] * 40, [1] * 30 + [0] * 2 + [1] * 8])
    segments = torch.tensor([[0] * 33 + [1] * 7, [0] * 40])
    whole = model(ids, attention_mask=mask, segment_ids=segments, use_cache=False).logits
    cache = model.new_cache()
    model(ids[:, :28], cache=cache)
    assert max(held(cache)) < 7
    cache.activate_past_recording()
    for rejected in (token_ids(2, 5, seed=9), token_ids(2, 9, seed=8)):
        model(rejected, cache=cache)
        cache.crop(28)
    assert cache.get_seq_length() == 28
    for columns in (slice(28, 31), slice(31, 40)):
        given = {"attention_mask": mask[:, columns], "segment_ids": segments[:, columns]}
        logits = model(ids[:, columns], cache=cache, **given).logits
        assert largest_difference(logits[mask[:, columns] > 0], whole[:, columns][mask[:, columns] > 0]) < 1e-12


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}], ids=str)
def test_windowed_models_write_the_same_without_a_cache(settings: dict[str, Any]) -> None:
    model = make_rlt(**WINDOWED)
    ids = token_ids(1, 9) % 5 + 1
    common: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 0} | settings
    reference = {name: value for name, value in common.items() if name != "prompt_lookup_num_tokens"}
    assert torch.equal(model.generate(ids, **common), model.generate(ids, use_cache=False, **reference))
