# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as a library, by its C functions: the one that PyPI's xllamacpp brings, or SPANKER_LIBLLAMA."""

import ctypes as c
import glob
import os

import numpy as np


class _Params(c.Structure):
    """Larger than any version's parameters, of which only the first words are touched. On x86-64 and AArch64, a
    structure of this size is passed by its place, so that what lies behind its end disturbs nobody."""

    _fields_ = [("words", c.c_uint32 * 128)]


class _Batch(c.Structure):
    _fields_ = [("count", c.c_int32), ("arrays", c.c_void_p * 6), ("rest", c.c_uint8 * 64)]


_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)


def _library():
    path = os.environ.get("SPANKER_LIBLLAMA")
    if not path:
        import xllamacpp

        path = glob.glob(os.path.join(os.path.dirname(xllamacpp.__file__), "*.so"))[0]
    lib = c.CDLL(path)
    for name, result, *arguments in [
        ("llama_model_default_params", _Params),
        ("llama_context_default_params", _Params),
        ("llama_model_load_from_file", c.c_void_p, c.c_char_p, _Params),
        ("llama_init_from_model", c.c_void_p, c.c_void_p, _Params),
        ("llama_batch_get_one", _Batch, c.c_void_p, c.c_int32),
        ("llama_decode", c.c_int32, c.c_void_p, _Batch),
        ("llama_get_logits_ith", c.POINTER(c.c_float), c.c_void_p, c.c_int32),
        ("llama_model_get_vocab", c.c_void_p, c.c_void_p),
        ("llama_vocab_n_tokens", c.c_int32, c.c_void_p),
        ("llama_tokenize", c.c_int32, c.c_void_p, c.c_char_p, c.c_int32, c.c_void_p, c.c_int32, c.c_bool, c.c_bool),
        ("llama_free", None, c.c_void_p),
    ]:
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.quiet = _LOG(lambda level, text, _: print(text.decode(), end="") if level == 4 else None)
    lib.llama_log_set(lib.quiet, None)
    lib.llama_backend_init()
    return lib


_LIBRARY = _library()


class Model:
    """A model's file."""

    def __init__(self, path):
        self._model = _LIBRARY.llama_model_load_from_file(
            str(path).encode(), _LIBRARY.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp does not read {path}")
        self._vocab = _LIBRARY.llama_model_get_vocab(self._model)
        self.vocab = _LIBRARY.llama_vocab_n_tokens(self._vocab)

    def tokens(self, text, special=True):
        text = text.encode()
        out = (c.c_int32 * (len(text) + 8))()
        count = _LIBRARY.llama_tokenize(
            self._vocab, text, len(text), c.cast(out, c.c_void_p), len(out), special, False
        )
        return list(out[:count])

    def logits(self, tokens, first=None, context=512):
        """The logits behind tokens: of the last one, or of all from the place `first` on."""
        params = _LIBRARY.llama_context_default_params()
        # The context, and the rows of a batch that may be asked for.
        params.words[0], params.words[1], params.words[2] = context, context, context
        run = _LIBRARY.llama_init_from_model(self._model, params)
        if not run:
            raise RuntimeError("llama.cpp makes no context")
        try:
            given = (c.c_int32 * len(tokens))(*tokens)
            batch = _LIBRARY.llama_batch_get_one(c.cast(given, c.c_void_p), len(tokens))
            places = [len(tokens) - 1] if first is None else range(first, len(tokens))
            wanted = (c.c_int8 * len(tokens))(*(at in places for at in range(len(tokens))))
            batch.arrays[5] = c.cast(wanted, c.c_void_p).value
            if _LIBRARY.llama_decode(run, batch) != 0:
                raise RuntimeError("llama.cpp does not decode")
            rows = [_LIBRARY.llama_get_logits_ith(run, at) for at in places]
            return np.array([np.ctypeslib.as_array(row, (self.vocab,)) for row in rows])
        finally:
            _LIBRARY.llama_free(run)
