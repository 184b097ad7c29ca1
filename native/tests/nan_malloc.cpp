// New memory is NaN in every dtype, so that reading it before writing shows: AddressSanitizer calls this at its start.
extern "C" const char* __asan_default_options() { return "max_malloc_fill_size=1073741824:malloc_fill_byte=255"; }
