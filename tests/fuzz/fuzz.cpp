// libFuzzer's entry to one of the fuzzers: QUOKA_FUZZ names its function, QUOKA_FUZZ_HEADER its header.
#include QUOKA_FUZZ_HEADER

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  quoka_fuzz::QUOKA_FUZZ({data, size});
  return 0;
}
