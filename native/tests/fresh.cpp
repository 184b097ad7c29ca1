// New memory is NaN to every dtype, so that what is read before it is written shows: AddressSanitizer asks this at its
// start.
extern "C" const char* __asan_default_options() { return "max_malloc_fill_size=1073741824:malloc_fill_byte=255"; }
