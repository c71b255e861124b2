// checksum_test TRIALS SEED: crc32 of random pieces is what a bit at a time gives, whatever their lengths,
// places and order. Prints "fine".
#include "checksum.h"

#include "random_plan.h"

namespace atsc::testing {
namespace {

uint32_t bit_by_bit(uint32_t crc, const unsigned char* data, size_t bytes) {
  crc = ~crc;
  for (size_t at = 0; at < bytes; ++at) {
    crc ^= data[at];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0xEDB88320u : 0);
  }
  return ~crc;
}

void test_pieces(Random& random, int num_trials) {
  std::vector<unsigned char> data(6000);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
  for (int trial = 0; trial < num_trials; ++trial) {
    const auto begin = static_cast<size_t>(below(random, 64));
    const auto length = static_cast<size_t>(below(random, trial % 2 == 0 ? 300 : 5000));
    const auto first = static_cast<size_t>(below(random, static_cast<int>(length) + 1));
    const uint32_t expected = bit_by_bit(0, &data[begin], length);
    EXPECT(crc32(0, &data[begin], length) == expected);
    const uint32_t part = crc32(0, &data[begin], first);
    EXPECT(crc32(part, &data[begin] + first, length - first) == expected);
  }
  EXPECT(crc32(0, "123456789", 9) == 0xCBF43926);  // the check value of catalogues of CRCs
}

}  // namespace
}  // namespace atsc::testing

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  atsc::testing::Random random(static_cast<uint64_t>(std::atoi(argv[2])));
  atsc::testing::test_pieces(random, std::atoi(argv[1]));
  std::puts("fine");
}
