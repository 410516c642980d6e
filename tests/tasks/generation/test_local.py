"""A writer on a model of the run: exactly the options, padding, ends, lengths, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from tasks.generation import GenerationOptions, LocalWriter, greedy, make_writer, row_seeds
from tasks.generation.local import num_positions
from tests.tasks.task_runs import llama
from tests.tasks.tiny_tokenizers import SPECIAL, make_tokenizer
from trainer import ConfigError, end_tokens

CPU = torch.device("cpu")
OPTIONS = GenerationOptions(max_new_tokens=6, temperature=1.3)
PROMPTS = [[5, 6, 7], [8], [9, 10]]


class Handle:
    """What a writer sees of a model, without an engine."""

    name = "actor"

    def __init__(self, module: Any) -> None:
        self.module, self.asked = module, {}

    def generate(self, *, gather: Any, **options: Any) -> Tensor:
        self.asked = options
        return self.module.generate(**options)


class Scripted(nn.Module):
    """A model that writes what it is told to."""

    def __init__(self, rows: list[list[int]]) -> None:
        super().__init__()
        self.rows = rows
        self.generation_config = GenerationConfig(eos_token_id=[1, 4])

    def generate(self, **options: Any) -> Tensor:
        return torch.cat([options["input_ids"], torch.tensor(self.rows)], dim=1)


def writer_of(module: Any) -> Any:
    return LocalWriter(Handle(module), make_tokenizer(), device=CPU)  # type: ignore[arg-type]


def test_prompts_are_padded_on_the_left_and_answers_end_with_their_first_end_token() -> None:
    writer = writer_of(Scripted([[9, 1, 0, 0], [9, 9, 9, 9], [4, 1, 1, 1]]))

    written = writer.write([[7, 8, 9], [], [6], [5, 5]], seeds=None, options=OPTIONS)

    assert written.answers == [[9, 1], [], [9, 9, 9, 9], [4]]
    assert written.is_ended == [True, True, False, True]
    asked = writer.model.asked
    assert asked["input_ids"].tolist() == [[7, 8, 9], [0, 0, 6], [0, 5, 5]]
    assert asked["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
    assert asked["eos_token_id"] == [1, 4]


def test_a_rank_without_a_prompt_takes_part_with_one_token() -> None:
    writer = writer_of(Scripted([[9]]))

    written = writer.write([[], []], seeds=[1, 2], options=OPTIONS)

    assert (written.answers, written.is_ended) == ([[], []], [True, True])
    assert (writer.model.asked["input_ids"].shape, writer.model.asked["max_new_tokens"]) == ((1, 1), 1)


def test_end_tokens_are_the_models_and_the_tokenizers() -> None:
    assert end_tokens(nn.Linear(1, 1), make_tokenizer()) == {SPECIAL.index("<end>")}
    assert end_tokens(Scripted([]), make_tokenizer()) == {1, 4}


def test_an_answer_does_not_depend_on_the_batch() -> None:
    writer, seeds = writer_of(llama("large").eval()), row_seeds(0, 5, [2, 7, 4])
    together = writer.write(PROMPTS, seeds=seeds, options=OPTIONS)

    torch.manual_seed(99)
    alone = [writer.write([p], seeds=[s], options=OPTIONS).answers[0] for p, s in zip(PROMPTS, seeds, strict=True)]
    turned = writer.write(PROMPTS[::-1], seeds=seeds[::-1], options=OPTIONS).answers[::-1]

    assert together.answers == alone == turned
    assert together == writer.write(PROMPTS, seeds=seeds, options=OPTIONS)


def test_samples_of_one_prompt_differ_and_so_do_steps() -> None:
    writer = writer_of(llama("large").eval())

    def write(step: int) -> list[list[int]]:
        return writer.write([[5, 6]] * 4, seeds=row_seeds(0, step, [3], samples=4), options=OPTIONS).answers

    assert len({tuple(answer) for answer in write(0)}) == 4
    assert write(0) != write(1)


def test_without_seeds_or_temperature_the_text_is_greedy() -> None:
    writer, model = writer_of(llama("large").eval()), llama("large").eval()

    found = writer.write(PROMPTS, seeds=None, options=OPTIONS)

    for prompt, answer in zip(PROMPTS, found.answers, strict=True):
        ids = list(prompt)
        for token in answer:
            assert model(torch.tensor([ids])).logits[0, -1].argmax() == token
            ids.append(token)
    assert found == writer.write(PROMPTS, seeds=[1, 2, 3], options=greedy(OPTIONS))


def test_nothing_of_the_models_own_options_is_left() -> None:
    plain, spoilt = llama("large").eval(), llama("large").eval()
    own = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=1,
        top_p=0.1,
        typical_p=0.5,
        epsilon_cutoff=0.2,
        repetition_penalty=5.0,
        no_repeat_ngram_size=1,
        bad_words_ids=[[42]],
        suppress_tokens=[7, 8, 9, 10, 41, 42],
        begin_suppress_tokens=[42],
        forced_bos_token_id=3,
        forced_eos_token_id=3,
        min_new_tokens=5,
        min_length=50,
        max_length=4,
        max_time=0.0,
        exponential_decay_length_penalty=(1, 5.0),
        sequence_bias=[[[20], 100.0]],
        renormalize_logits=True,
        guidance_scale=3.0,
        use_cache=False,
        stop_strings=["a"],
        num_return_sequences=3,
        output_scores=True,
        return_dict_in_generate=True,
        eos_token_id=2,
        pad_token_id=0,
        prompt_lookup_num_tokens=3,
    )
    spoilt.generation_config = own
    expected, writer, seeds = writer_of(plain), writer_of(spoilt), row_seeds(0, 0, range(3))

    for options in (OPTIONS, greedy(OPTIONS)):
        found = writer.write(PROMPTS, seeds=seeds, options=options)
        assert found == expected.write(PROMPTS, seeds=seeds, options=options)
    assert spoilt.generation_config is own


def test_a_stop_text_ends_an_answer_and_its_neighbours_go_on() -> None:
    writer, tokenizer = writer_of(llama("large").eval()), make_tokenizer()
    free = writer.write(PROMPTS, seeds=None, options=greedy(OPTIONS)).answers
    stop = tokenizer.decode(free[1][1:3])

    found = writer.write(PROMPTS, seeds=None, options=GenerationOptions(max_new_tokens=6, temperature=0, stop=(stop,)))

    length = next(n for n in range(1, 7) if stop in tokenizer.decode(free[1][:n]))
    assert (found.answers[1], found.is_ended[1]) == (free[1][:length], True)
    for index in (0, 2):
        text = tokenizer.decode(free[index])
        assert stop in text or found.answers[index] == free[index]


def test_an_adapted_model_gets_its_own_options_back() -> None:
    peft = pytest.importorskip("peft")
    model = llama("large")
    model.generation_config = GenerationConfig(repetition_penalty=5.0, eos_token_id=2)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")).eval()

    found = writer_of(adapted).write(PROMPTS, seeds=None, options=OPTIONS)

    assert found == writer_of(llama("large").eval()).write(PROMPTS, seeds=None, options=OPTIONS)
    assert adapted.get_base_model().generation_config.repetition_penalty == 5.0


def test_what_is_longer_than_the_models_positions_is_refused_by_name() -> None:
    module = llama("large").eval()
    module.config.max_position_embeddings = 8
    writer = writer_of(module)

    with pytest.raises(ConfigError, match=r"a prompt of 3 tokens and 6 new ones .* the 8 positions of models\.actor"):
        writer.write(PROMPTS, seeds=None, options=OPTIONS)
    with pytest.raises(ConfigError, match="a prompt of 1 tokens and 8 new ones"):
        make_writer(
            Handle(module),  # type: ignore[arg-type]
            make_tokenizer(),
            options=GenerationOptions(max_new_tokens=8),
            device=CPU,
        )
    assert num_positions(nn.Linear(1, 1)) is None


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_written_for_all_who_read_it() -> None:
    module, short = llama("large").eval(), llama("small").eval()
    module.config.max_position_embeddings, short.config.max_position_embeddings = 16, 8
    critic = Handle(short)
    critic.name = "critic"

    with pytest.raises(ConfigError) as refused:
        make_writer(
            Handle(module),  # type: ignore[arg-type]
            make_tokenizer(),
            options=GenerationOptions(max_new_tokens=6),
            device=CPU,
            prompt=11,
            readers=[critic],  # type: ignore[list-item]
        )

    told = [problem.partition("positions of ")[2].partition(";")[0] for problem in refused.value.problems]
    assert told == ["models.critic", "models.actor"]


def test_a_seed_is_needed_for_each_prompt() -> None:
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        writer_of(llama("large")).write(PROMPTS, seeds=[1, 2], options=OPTIONS)
