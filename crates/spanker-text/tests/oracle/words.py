#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes words.json: how Hugging Face's tokenizers (PyPI `tokenizers`) cut texts by the patterns as they are published.

    python3 words.py > words.json
"""

import json

from tokenizers import Regex, pre_tokenizers

SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + LINES
QWEN2 = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + LINES
QWEN35 = SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + LINES
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def capitals(number, short, upper=UPPER, lower=LOWER, first="", ends=r"[\r\n/]*"):
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}{before}{upper}*{lower}+{short}|{before}{upper}+{lower}*{short}|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{ends}|{LINES}"
    )


GPT4O = capitals(r"\p{N}{1,3}", SHORT + "?")
KIMI = capitals(
    r"\p{N}{1,3}",
    SHORT + "?",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{Han}]+|",
    r"[\r\n]*",
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + LINES
)
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
HALVED = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
RULES = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "qwen2": [QWEN2],
    "qwen35": [QWEN35],
    "laguna": [r"[^\n]+|[\n]+", QWEN2],
    "jais-2": [LLAMA3.replace(r"\s+(?!\S)|\s+", HALVED + r"|\s{1,2}(?!\S)|\s{1}")],
    "minicpm5": [r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")],
    "tekken": [capitals(r"\p{N}", "")],
    "gpt-4o": [GPT4O],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O],
    "kimi-k2": [KIMI],
    "youtu": [
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        capitals(r"\p{N}", SHORT + "?"),
    ],
    "deepseek-coder": [
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"
    ],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3],
    "afmoe": [
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        DEEPSEEK3,
    ],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"],
    "bloom": [BLOOM],
    "viking": [BLOOM, r"\p{N}"],
    "chameleon": [
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ],
    "exaone-moe": [
        SHORT + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "seed-coder": [
        SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
}
TEXTS = [
    "Hello  world's 123!?\n\n x",
    "I'LL say we'Re 'twas DON'T it'd'Ve, o'clock 'S' l'été",
    " \t\n  \n\tx \r\n\r\n y\n   ",
    "   three   spaces    \t\t end  ",
    "1 12 123 1234 12345 1234567 1,234.56 v2a 0x1F ½ ²³ ٣٤٥٦ 12345a 123_456",
    "GetHTTPResponse iPhone McDonald's HTMLParser's ÉCOLE École élÈve ǅungla ΑΒΓαβγ",
    "for (int i = 0; i < 10; ++i) {\n\tprintf(\"%d\\n\", a[i]);\n}\n\n// end",
    "https://example.com/a/b?c=d&e=f#g /usr/bin/env //\n///\r\n",
    "Привет, мир! 你好，世界。こんにちは世界 안녕하세요 세계 ภาษาไทย עברית العربية हिन्दी में",
    "naïve e\u0301te\u0301 a\u0300\u0301b x\u0327\u0327 \u0301alone",
    "🚀 (normal) 😶‍🌫️ (multiple emojis) ✅ 👩‍👩‍👧 !!?! …—–“quoted”‘single’ «guillemets»",
    "<sentinel:12> IMGIMGABCZ IMGIMGABCDEZ <|im_start|> [INST] </s> $5 + 6 = x^2 ~ y | z `code`",
    "\u00a0nbsp\u00a0\u00a0two \u3000ideographic\u3000 \u2028line \u200bzero\ufeffbom",
    "a" * 40 + " " * 37 + "b" + " " * 600 + "c" + " " * 5,
    "漢字かなカナ12漢字abc한글def ㄅㄆ ㄱㄴ 。、！？ ｆｕｌｌ　ｗｉｄｔｈ ℃№™",
    "'''s '' 't's'll'll 'sS'D '\n'\r\n;\n;;\n\n ;\n \n;",
]


def words(patterns, text):
    step = lambda pattern: pre_tokenizers.Split(Regex(pattern), "isolated")
    rule = pre_tokenizers.Sequence([step(pattern) for pattern in patterns])
    return [len(word) for word, _ in rule.pre_tokenize_str(text)]


if __name__ == "__main__":
    print("{")
    print(f'"texts": {json.dumps(TEXTS, ensure_ascii=False)},')
    lines = (f'"{name}": {json.dumps([words(steps, text) for text in TEXTS], separators=(",", ":"))}' for name, steps in RULES.items())
    print(",\n".join(lines))
    print("}")
