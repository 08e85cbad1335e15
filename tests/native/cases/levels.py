"""The level chosen for other processors: all have the whole of AVX-512, and the last ones AMX."""

from ctypes import POINTER, byref, c_char_p, c_int32, c_uint32

from goldsmith.core import native

LIBRARY = native.library()
LIBRARY.gs_selftest_level.argtypes = [c_int32, c_uint32, c_int32, c_int32, POINTER(c_char_p)]
NO_AMX = "the processor has no AMX (tile, int8, bf16)"
NO_TILES = "the operating system does not give this process the AMX tiles"
HALF = "this processor's bfloat16 products take twice as long as its float32 products"
COOPER_LAKE, SAPPHIRE_RAPIDS, ZEN_4 = 85, 143, 97


def level_of(intel, model, amx, tiles):
    why = c_char_p()
    level = LIBRARY.gs_selftest_level(intel, model, amx, tiles, byref(why))
    return native.LEVELS[level], why.value.decode()


for processor, expected in {
    (False, ZEN_4, False, False): ("avx512_bf16", NO_AMX),
    (False, ZEN_4, True, False): ("avx512_bf16", NO_TILES),
    (True, COOPER_LAKE, False, False): ("avx512_bf16", NO_AMX),
    (True, SAPPHIRE_RAPIDS, False, False): ("avx512_vnni", HALF),
    (True, SAPPHIRE_RAPIDS, True, False): ("avx512_vnni", HALF),
    (True, SAPPHIRE_RAPIDS, True, True): ("amx", ""),
}.items():
    assert level_of(*processor) == expected, processor
