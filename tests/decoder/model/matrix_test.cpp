// Products of stored weights and activations, against sums in double.
#include "decoder/model/matrix.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

namespace quoka_decoder {
namespace {

struct Weights {
  std::vector<std::byte> bytes;
  Matrix matrix;
};

// Random values of this type: floats, or blocks of Q8_0.
Weights random_weights(TensorType type, Index rows, Index columns) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(rows * columns));
  for (float& value : values) value = normal(random);
  Weights w;
  w.bytes.resize(static_cast<std::size_t>(bytes_of(type, rows * columns)));
  if (type == TensorType::q8_0)
    quantize_q8_0(values.data(), rows * columns, w.bytes.data());
  else
    std::memcpy(w.bytes.data(), values.data(), w.bytes.size());
  w.matrix.type = type;
  w.matrix.rows = rows;
  w.matrix.columns = columns;
  w.matrix.data = w.bytes.data();
  return w;
}

Vector random_vector(Index count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Vector values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// One element of x w^T in double, from the weights as they are stored.
double product_at(const Matrix& w, const Vector& x, Index token, Index row) {
  Vector weights(static_cast<std::size_t>(w.columns));
  w.read_row(row, weights.data());
  double sum = 0.0;
  for (Index c = 0; c < w.columns; ++c)
    sum += static_cast<double>(x[static_cast<std::size_t>(token * w.columns + c)]) *
           weights[static_cast<std::size_t>(c)];
  return sum;
}

struct Case {
  TensorType type;
  Index tokens, rows, columns;
};

class MatrixProducts : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Sizes, MatrixProducts,
    testing::Values(Case{TensorType::f32, 1, 1, 1}, Case{TensorType::f32, 3, 37, 127},
                    Case{TensorType::f32, 37, 201, 127}, Case{TensorType::q8_0, 1, 129, 96},
                    Case{TensorType::q8_0, 4, 501, 320}, Case{TensorType::q8_0, 129, 1031, 64}));

TEST_P(MatrixProducts, AreTheSumsInDouble) {
  const auto [type, tokens, rows, columns] = GetParam();
  const Weights w = random_weights(type, rows, columns);
  const Vector x = random_vector(tokens * columns, 8);
  Vector y(static_cast<std::size_t>(tokens * rows), std::nanf(""));
  quoka::ThreadPool threads(2);
  MatrixProduct product(threads);
  product(w.matrix, Rows<const float>(x.data(), tokens, columns),
          Rows<float>(y.data(), tokens, rows));
  // Each sum of `columns` normal products is rounded about that often.
  const double bound = 1e-6 * std::sqrt(static_cast<double>(columns)) * 4.0;
  for (Index t = 0; t < tokens; ++t)
    for (Index r = 0; r < rows; ++r)
      ASSERT_NEAR(y[static_cast<std::size_t>(t * rows + r)], product_at(w.matrix, x, t, r),
                  bound * std::sqrt(static_cast<double>(columns)))
          << "token " << t << ", row " << r;
}

TEST_P(MatrixProducts, AreAddedToWhatIsThere) {
  const auto [type, tokens, rows, columns] = GetParam();
  const Weights w = random_weights(type, rows, columns);
  const Vector x = random_vector(tokens * columns, 9), before = random_vector(tokens * rows, 10);
  Vector product_alone(before.size()), added = before;
  quoka::ThreadPool threads(1);
  MatrixProduct product(threads);
  const Rows<const float> in(x.data(), tokens, columns);
  product(w.matrix, in, Rows<float>(product_alone.data(), tokens, rows));
  product(w.matrix, in, Rows<float>(added.data(), tokens, rows), Write::add);
  for (std::size_t i = 0; i < added.size(); ++i)
    ASSERT_NEAR(added[i], before[i] + product_alone[i], 1e-5 * (1.0 + std::abs(added[i])));
}

TEST_P(MatrixProducts, DoNotDependOnThreads) {
  const auto [type, tokens, rows, columns] = GetParam();
  const Weights w = random_weights(type, rows, columns);
  const Vector x = random_vector(tokens * columns, 11);
  Vector results[2];
  for (const int workers : {1, 3}) {
    quoka::ThreadPool threads(workers);
    MatrixProduct product(threads);
    Vector& y = results[workers == 1 ? 0 : 1];
    y.resize(static_cast<std::size_t>(tokens * rows));
    product(w.matrix, Rows<const float>(x.data(), tokens, columns),
            Rows<float>(y.data(), tokens, rows));
  }
  EXPECT_EQ(results[0], results[1]);
}

// Blocks of rows run at the same time: a BLAS that is not made for that mixes them up now and then.
TEST(MatrixProduct, GivesTheSameBitsEveryTime) {
  const Weights w = random_weights(TensorType::q8_0, 768, 256);
  const Vector x = random_vector(96 * 256, 12);
  const auto product_on = [&](MatrixProduct& product) {
    Vector y(96 * 768);
    product(w.matrix, Rows<const float>(x.data(), 96, 256), Rows<float>(y.data(), 96, 768));
    return y;
  };
  quoka::ThreadPool one(1), four(4);
  MatrixProduct alone(one), together(four);
  const Vector expected = product_on(alone);
  for (int i = 0; i < 100; ++i) ASSERT_EQ(product_on(together), expected) << "time " << i;
}

TEST(MatrixProduct, RefusesSizesThatDoNotFit) {
  const Weights w = random_weights(TensorType::f32, 5, 7);
  Vector x(14), y(10);
  quoka::ThreadPool threads(1);
  MatrixProduct product(threads);
  try {
    product(w.matrix, Rows<const float>(x.data(), 2, 6), Rows<float>(y.data(), 2, 5));
    FAIL() << "6 values met rows of 7";
  } catch (const std::invalid_argument& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find('6'), std::string::npos) << what;
    EXPECT_NE(what.find('7'), std::string::npos) << what;
  }
  EXPECT_THROW(product(w.matrix, Rows<const float>(x.data(), 2, 7), Rows<float>(y.data(), 2, 4)),
               std::invalid_argument);
  EXPECT_THROW(product(w.matrix, Rows<const float>(x.data(), 2, 7), Rows<float>(y.data(), 1, 5)),
               std::invalid_argument);
}

}  // namespace
}  // namespace quoka_decoder
