// The attention of an engine in C, as quoka/c.h computes it: one call in place of its loops, exact. The engine keeps
// [layer, position, kv_dim] of float for keys and for values, as llama2.c and many others do, and has written the new
// tokens' keys and values there before it attends.
//
//     engine                runs one layer of 32/8 heads of 128 at position 4,096 both ways and compares
//
// Compile by hand: cc -O2 engine.c $(pkg-config --cflags --libs quoka-c) -lm
#include <quoka/c.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

// The engine's own buffers.
struct engine {
  int n_heads, n_kv_heads, head_size, seq_len;
  float *q, *result;               // [tokens, n_heads, head_size]
  float *key_cache, *value_cache;  // [layer, seq_len, n_kv_heads, head_size]
  quoka_threads* threads;
  quoka_workspace* workspace;
};

// Attention of `tokens` new tokens at positions pos, pos + 1, ... of a layer: from e->q, over the cache, to e->result.
// A decode step is one token; a prompt, or a chunk of it, many at once, which is faster by far.
static int attention(const struct engine* e, int layer, int pos, int tokens) {
  const size_t begin = (size_t)layer * e->seq_len * e->n_kv_heads * e->head_size;
  const int64_t heads = e->n_heads, kv_heads = e->n_kv_heads, dim = e->head_size,
                len = pos + tokens;
  const quoka_tensor q = quoka_token_major(e->q, QUOKA_F32, tokens, heads, dim),
                     k = quoka_token_major(e->key_cache + begin, QUOKA_F32, len, kv_heads, dim),
                     v = quoka_token_major(e->value_cache + begin, QUOKA_F32, len, kv_heads, dim),
                     out = quoka_token_major(e->result, QUOKA_F32, tokens, heads, dim);
  const quoka_attention_args call = {.size = sizeof call,
                                     .q = &q,
                                     .k_cache = &k,
                                     .v_cache = &v,
                                     .cache_holds_chunk = 1,
                                     .out = &out,
                                     .workspace = e->workspace,
                                     .threads = e->threads};
  const quoka_status status = quoka_attention(&call);
  if (status != QUOKA_OK) fprintf(stderr, "attention: %s\n", quoka_message());
  return status == QUOKA_OK;
}

// The loops that it replaces: one token.
static void plain_attention(const struct engine* e, int layer, int pos, float* scores,
                            float* result) {
  const int group = e->n_heads / e->n_kv_heads, size = e->head_size;
  for (int h = 0; h < e->n_heads; ++h) {
    const float* q = e->q + h * size;
    const size_t first = ((size_t)layer * e->seq_len * e->n_kv_heads + h / group) * size;
    const size_t step = (size_t)e->n_kv_heads * size;
    float top = -INFINITY, sum = 0;
    for (int t = 0; t <= pos; ++t) {
      float x = 0;
      for (int c = 0; c < size; ++c) x += q[c] * e->key_cache[first + t * step + c];
      scores[t] = x / sqrtf((float)size);
      if (scores[t] > top) top = scores[t];
    }
    for (int t = 0; t <= pos; ++t) sum += scores[t] = expf(scores[t] - top);
    for (int c = 0; c < size; ++c) result[h * size + c] = 0;
    for (int t = 0; t <= pos; ++t)
      for (int c = 0; c < size; ++c)
        result[h * size + c] += scores[t] / sum * e->value_cache[first + t * step + c];
  }
}

static float* random_floats(size_t count) {
  float* x = malloc(count * sizeof *x);
  if (x == NULL) exit(1);
  for (size_t i = 0; i < count; ++i) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  return x;
}

static double seconds(clock_t from) { return (double)(clock() - from) / CLOCKS_PER_SEC; }

int main(void) {
  const int pos = 4096;
  struct engine e = {.n_heads = 32, .n_kv_heads = 8, .head_size = 128, .seq_len = pos + 1};
  const size_t width = (size_t)e.n_heads * e.head_size,
               cache = (size_t)e.seq_len * e.n_kv_heads * e.head_size;
  e.q = random_floats(width), e.result = random_floats(width);
  e.key_cache = random_floats(cache), e.value_cache = random_floats(cache);
  float *plain = random_floats(width), *scores = random_floats((size_t)e.seq_len);
  if (quoka_workspace_create(&e.workspace) != QUOKA_OK) return 1;

  clock_t begin = clock();
  plain_attention(&e, 0, pos, scores, plain);
  const double before = seconds(begin);
  if (!attention(&e, 0, pos, 1)) return 1;  // the first call also allocates
  begin = clock();
  if (!attention(&e, 0, pos, 1)) return 1;
  const double now = seconds(begin);

  float largest = 0;
  for (size_t i = 0; i < width; ++i) largest = fmaxf(largest, fabsf(plain[i] - e.result[i]));
  printf(
      "one token over %d keys: plain loops %.1f ms, quoka %.2f ms (%s); largest difference %.1e\n",
      pos + 1, 1e3 * before, 1e3 * now, quoka_isa(), (double)largest);
  quoka_workspace_free(e.workspace);
  free(e.q), free(e.result), free(e.key_cache), free(e.value_cache), free(plain), free(scores);
  return largest < 1e-5f ? 0 : 1;
}
