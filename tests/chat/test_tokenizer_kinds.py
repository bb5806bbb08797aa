"""Parsing on ids: byte-level BPE, SentencePiece and tiktoken vocabularies, with and without BOS, several EOS ids."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from agentrl.chat.renderer import Renderer
from agentrl.testing.tokenizers import qwen_like_tokenizer
from tests.chat import written_calls
from tests.chat.family_rounds import CALLS as FAMILY_CALLS
from tests.chat.family_rounds import assert_exact, assert_read, encode, play, play_rounds, renderer, thoughts
from tests.chat.members import TOOL_USERS
from tests.chat.written_calls import tool_schemas
from tests.envs.sandbox.conftest import missing

REAL = Path(__file__).parents[2] / ".cache" / "tokenizers"
SPECIAL = ["<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CALLS = [("edit", {"text": "  Zürich\n\n東京 🙂\t'x'\n"}), ("add", {"a": 37, "b": [1, None]})]


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def tiktoken():
    """As transformers converts a tiktoken file: its pattern splits, ranks are merges, whole words need none."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {byte: index for index, byte in enumerate(alphabet)} | {"Ġth": 256, "th": 257, "in": 258, '":': 259}
    merges = [("t", "h"), ("i", "n"), ("Ġ", "th"), ('"', ":")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece():
    """As transformers converts a SentencePiece model with byte fallback: spaces are ▁, one is put in front."""
    characters = [chr(code) for code in range(33, 127)]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {character: 257 + index for index, character in enumerate(["▁", *characters])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def tokenizer_of(kind, bos, eos="<|im_end|>"):
    backend = kind()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    if bos:
        first = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[first])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>" if bos else None, eos_token=eos)
    tokenizer.chat_template = ("{{ bos_token }}" if bos else "") + qwen_like_tokenizer().chat_template
    return tokenizer


kinds = pytest.mark.parametrize("kind", [byte_level, sentencepiece, tiktoken], ids=lambda kind: kind.__name__)


@kinds
@pytest.mark.parametrize("bos", [False, True], ids=["without BOS", "with BOS"])
def test_a_turn_is_read_from_its_ids_exactly(kind, bos):
    tokenizer = tokenizer_of(kind, bos)
    renderer = Renderer(tokenizer, tools=True)
    text = "<think>\nhm, 東京\n</think>\n\nLet  me see.\n" + written_calls.hermes(CALLS)
    ids = tokenizer.encode(text, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for sampled in (ids, [*ids, end]):
        turn = renderer.parse(sampled, tool_schemas(CALLS))
        assert [(call.name, call.arguments, call.error) for call in turn.calls] == [(*call, None) for call in CALLS]
        assert turn.message["content"] == "Let  me see."
        assert turn.message["reasoning_content"] == "hm, 東京"


@kinds
@pytest.mark.parametrize("bos", [False, True], ids=["without BOS", "with BOS"])
def test_a_prompt_has_one_bos_or_none(kind, bos):
    tokenizer = tokenizer_of(kind, bos)
    renderer = Renderer(tokenizer, tools=True)
    messages = [{"role": "user", "content": "q"}]
    first = tokenizer.convert_tokens_to_ids("<s>")
    for prompt in (messages, "plain text"):
        assert renderer.prompt_ids(prompt, None).count(first) == bos


@kinds
def test_a_turn_ends_at_any_declared_eos_and_none_of_them_is_content_e01(kind):
    """The tokenizer's EOS is not the template's end of turn, and the generation config declares a third id."""
    tokenizer = tokenizer_of(kind, False, eos="<|endoftext|>")
    third = tokenizer.convert_tokens_to_ids("<|im_start|>")
    renderer = Renderer(tokenizer, tools=True, eos_ids=[third])
    end, eos = (tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>"))
    assert renderer.stop_ids == {end, eos, third}
    ids = tokenizer.encode(written_calls.hermes(CALLS), add_special_tokens=False)
    answer = tokenizer.encode("42", add_special_tokens=False)
    result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "5"}
    suffixes = set()
    for stop in (end, eos, third):
        turn = renderer.parse([*ids, stop], None)
        assert [call.error for call in turn.calls] == [None, None]
        assert renderer.parse([*answer, stop], None).message == {"role": "assistant", "content": "42"}
        suffixes.add(tuple(renderer.suffix_ids(stop, turn.message, [result], None)))
    assert len(suffixes) == 1


@kinds
def test_a_line_break_that_is_an_added_token_ends_no_turn(kind):
    """Gemma 3 has added tokens for line breaks, which its template writes behind the end of a turn."""
    tokenizer = tokenizer_of(kind, False)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("\n", "\n\n")])
    assert Renderer(tokenizer, tools=True).stop_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize("name", ["Phi-3", "Phi-3.5"])
def test_role_markers_that_take_the_white_space_behind_them_keep_rows_exact(name):
    """The markers of Phi-3's tokenizer swallow the line break that its template writes behind each."""
    [member] = [member for member in TOOL_USERS if member.name == name]
    tokenizer = copy.deepcopy(member.tokenizer())
    markers = [f"<|{name}|>" for name in ("system", "user", "assistant", "end")]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(text, special=True, rstrip=True) for text in markers]}
    )
    assert tokenizer.encode("<|end|>\n", add_special_tokens=False) == [tokenizer.convert_tokens_to_ids("<|end|>")]
    bridge = Renderer(tokenizer, tools=True, eos_ids=member.eos_ids_of(tokenizer))
    episode = play_rounds(member, bridge, None, "Be brief.", [("", FAMILY_CALLS[:1]), ("Hm.", FAMILY_CALLS)])
    assert_exact(episode)
    assert_read(episode)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "write"),
    [
        ("qwen3", "Qwen3", written_calls.hermes),
        ("qwen3", "Qwen3.5", written_calls.xml),
        ("deepseek_v3", "DeepSeek-R1", written_calls.deepseek),
        ("llama3_1", "Llama 3.1", written_calls.llama),
        ("gemma3", "Gemma 3", written_calls.hermes),
        ("gptoss", "GPT-OSS", written_calls.harmony),
    ],
)
def test_published_tokenizers_are_exact(name, model, write):
    """Tokenizers of the models themselves, fetched by `make tokenizers`; Gemma's is a SentencePiece one."""
    if not (REAL / name).is_dir():
        missing("`make tokenizers` fetches the published tokenizers")
    [stand_in] = [member for member in TOOL_USERS if member.name == model]
    member = replace(stand_in, folder=REAL / name)
    for thought in thoughts(member):
        episode = play(member, thought, member.parallel)
        assert_exact(episode)
        assert_read(episode)
    bridge = renderer(member)
    # A generation prompt that opens reasoning leaves it to the turn to close it.
    thought = "hm\n</think>\n\n" if bridge._prompt.rstrip().endswith("<think>") else ""
    turn = bridge.parse(encode(bridge, thought + write(CALLS)), tool_schemas(CALLS))
    assert [(call.name, call.arguments, call.error) for call in turn.calls] == [(*call, None) for call in CALLS]
    assert turn.message["content"] == ""
