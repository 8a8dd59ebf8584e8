/* quoka/c.h from C99: its helpers and structs, attention against loops in double, and threads of the caller's. What the
   functions compute and refuse is in c_door_test.cpp, which compares bits with the C++ functions. */
#include <quoka/c.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures = 0;

#define CHECK(holds)                                                                           \
  do {                                                                                         \
    if (!(holds)) {                                                                            \
      ++failures;                                                                              \
      fprintf(stderr, "%s:%d: not so: %s; the last message: %s\n", __FILE__, __LINE__, #holds, \
              quoka_message());                                                                \
    }                                                                                          \
  } while (0)

enum { past = 37, chunk = 9, q_heads = 6, kv_heads = 2, group = 3, dim = 24, v_dim = 20 };

/* Token major; the cache holds past and chunk. */
static float q[chunk * q_heads * dim], k[(past + chunk) * kv_heads * dim],
    v[(past + chunk) * kv_heads * v_dim], out[chunk * q_heads * v_dim], lse[q_heads * chunk];

static unsigned state_of_random = 12345;
static void fill(float* x, int64_t count, float scale) {
  int64_t i;
  for (i = 0; i < count; ++i) {
    state_of_random = state_of_random * 1664525u + 1013904223u;
    x[i] = scale * ((float)(state_of_random >> 8) / 8388608.0f - 1.0f);
  }
}

/* The output of query i of head h, and its log-sum-exp. */
static double expected_row(int64_t i, int64_t h, double* row) {
  const int64_t keys = past + i + 1, kv = h / group;
  double logits[past + chunk], top = -INFINITY, sum = 0;
  int64_t t, c;
  for (t = 0; t < keys; ++t) {
    double x = 0;
    for (c = 0; c < dim; ++c)
      x += (double)q[(i * q_heads + h) * dim + c] * (double)k[(t * kv_heads + kv) * dim + c];
    logits[t] = x / sqrt((double)dim);
    if (logits[t] > top) top = logits[t];
  }
  for (c = 0; c < v_dim; ++c) row[c] = 0;
  for (t = 0; t < keys; ++t) {
    const double weight = exp(logits[t] - top);
    sum += weight;
    for (c = 0; c < v_dim; ++c) row[c] += weight * (double)v[(t * kv_heads + kv) * v_dim + c];
  }
  for (c = 0; c < v_dim; ++c) row[c] /= sum;
  return top + log(sum);
}

/* The largest error of out and lse, which are cleared for the next call. */
static double largest_error(void) {
  double worst = 0, row[v_dim];
  int64_t i, h, c;
  for (i = 0; i < chunk; ++i)
    for (h = 0; h < q_heads; ++h) {
      double error = fabs(expected_row(i, h, row) - (double)lse[h * chunk + i]);
      if (!(error <= worst)) worst = error;
      for (c = 0; c < v_dim; ++c) {
        error = fabs(row[c] - (double)out[(i * q_heads + h) * v_dim + c]);
        if (!(error <= worst)) worst = error;
      }
    }
  memset(out, 0, sizeof out), memset(lse, 0, sizeof lse);
  return worst;
}
/* Of float, and of what automatic may take for float: by AMX numbers are split into parts of bfloat16. */
static const double tolerance = 2e-6, split_tolerance = 2e-5;

static int32_t run_backwards(void* context, int64_t tasks, quoka_task task, void* argument) {
  int64_t i;
  *(int64_t*)context += tasks;
  for (i = tasks; i-- > 0;) task(argument, i, (int32_t)(i % 3));
  return 0;
}

int quoka_c_test(void); /* from main.c and c_door_test.cpp */
int quoka_c_test(void) {
  const quoka_tensor queries = quoka_token_major(q, QUOKA_F32, chunk, q_heads, dim),
                     past_k = quoka_token_major(k, QUOKA_F32, past, kv_heads, dim),
                     past_v = quoka_token_major(v, QUOKA_F32, past, kv_heads, v_dim),
                     all_k = quoka_token_major(k, QUOKA_F32, past + chunk, kv_heads, dim),
                     all_v = quoka_token_major(v, QUOKA_F32, past + chunk, kv_heads, v_dim),
                     chunk_k = quoka_token_major(k + past * kv_heads * dim, QUOKA_F32, chunk,
                                                 kv_heads, dim),
                     chunk_v = quoka_token_major(v + past * kv_heads * v_dim, QUOKA_F32, chunk,
                                                 kv_heads, v_dim),
                     result = quoka_token_major(out, QUOKA_F32, chunk, q_heads, v_dim);
  quoka_attention_args call;
  quoka_attention_options options;
  quoka_executor executor;
  quoka_threads* threads = NULL;
  float slopes[q_heads];
  int64_t tasks = 0;
  fill(q, chunk * q_heads * dim, 3.0f);
  fill(k, (past + chunk) * kv_heads * dim, 1.0f), fill(v, (past + chunk) * kv_heads * v_dim, 1.0f);
  CHECK(strlen(quoka_version()) >= 5 && strlen(quoka_isa()) >= 3);
  CHECK(quoka_alibi_slopes(q_heads, 8.0f, slopes) == QUOKA_OK);
  /* The paper's: of 4 heads, and those between them that 8 have. */
  CHECK(slopes[0] == 0.25f && slopes[3] == 0.00390625f && slopes[4] == 0.5f && slopes[5] == 0.125f);
  CHECK(quoka_alibi_slopes(2, 4.0f, slopes) == QUOKA_OK && slopes[0] == 0.25f &&
        slopes[1] == 0.0625f);

  memset(&call, 0, sizeof call);
  call.size = sizeof call;
  call.q = &queries, call.out = &result, call.lse_nat = lse;
  call.k_cache = &past_k, call.v_cache = &past_v, call.chunk_k = &chunk_k, call.chunk_v = &chunk_v;
  CHECK(quoka_attention(&call) == QUOKA_OK && largest_error() < split_tolerance); /* automatic */
  memset(&options, 0, sizeof options);
  options.size = sizeof options, options.arithmetic = QUOKA_ARITHMETIC_FLOAT,
  call.options = &options;
  CHECK(quoka_attention(&call) == QUOKA_OK && largest_error() < tolerance);
  call.k_cache = &all_k, call.v_cache = &all_v, call.chunk_k = call.chunk_v = NULL;
  call.cache_holds_chunk = 1;
  CHECK(quoka_attention(&call) == QUOKA_OK && largest_error() < tolerance);

  memset(&executor, 0, sizeof executor);
  executor.size = sizeof executor, executor.context = &tasks, executor.workers = 3,
  executor.run = run_backwards;
  CHECK(quoka_threads_of_caller(&executor, &threads) == QUOKA_OK);
  memset(&executor, 0xff, sizeof executor); /* it was copied */
  call.threads = threads;
  CHECK(quoka_attention(&call) == QUOKA_OK && tasks > 0 && largest_error() < tolerance);
  quoka_threads_free(threads);
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures;
}
