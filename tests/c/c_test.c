/* quoka/c.h from C99: attention against loops in double, everything in memory that ends at a page nobody may touch,
   inputs in pages that nobody may write; selection, handles, executors; what is refused, by which words, and that
   nothing was written then. Every option, mask, list and selection: c_door_test.cpp, which compares bits with the C++
   functions. */
#if !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* mmap's MAP_ANONYMOUS */
#endif
#include <quoka/c.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#define HAS_FENCES 1
#endif

static int failures = 0;

#define CHECK(holds)                                                                           \
  do {                                                                                         \
    if (!(holds)) {                                                                            \
      ++failures;                                                                              \
      fprintf(stderr, "%s:%d: not so: %s; the last message: %s\n", __FILE__, __LINE__, #holds, \
              quoka_message());                                                                \
    }                                                                                          \
  } while (0)
#define CHECK_OK(call) CHECK((call) == QUOKA_OK)

/* The call is refused, and the message has both words. */
#define CHECK_REFUSED(call, first, second)          \
  do {                                              \
    CHECK((call) == QUOKA_INVALID);                 \
    CHECK(strstr(quoka_message(), first) != NULL);  \
    CHECK(strstr(quoka_message(), second) != NULL); \
  } while (0)

/* ---- memory ------------------------------------------------------------------------------------ */

/* `bytes` that end where a protected page begins. They are never freed: the test ends soon. */
static void* fenced(size_t bytes) {
#ifdef HAS_FENCES
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (bytes + page - 1) / page * page;
  char* all =
      mmap(NULL, inner + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED || mprotect(all, page, PROT_NONE) != 0 ||
      mprotect(all + page + inner, page, PROT_NONE) != 0) {
    perror("fenced");
    exit(1);
  }
  return all + page + inner - bytes;
#else
  return calloc(bytes + 1, 1);
#endif
}

/* From now on it is only read. */
static void make_read_only(void* memory, size_t bytes) {
#ifdef HAS_FENCES
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  char* begin = (char*)((size_t)memory / page * page);
  if (mprotect(begin, (size_t)((char*)memory + bytes - begin), PROT_READ) != 0) {
    perror("make_read_only");
    exit(1);
  }
#else
  (void)memory, (void)bytes;
#endif
}

static unsigned state_of_random = 12345;
static float random_number(void) { /* in [-1, 1) */
  state_of_random = state_of_random * 1664525u + 1013904223u;
  return (float)(state_of_random >> 8) / 8388608.0f - 1.0f;
}

static float* random_floats(int64_t count, float scale) {
  float* x = fenced((size_t)count * sizeof *x);
  int64_t i;
  for (i = 0; i < count; ++i) x[i] = scale * random_number();
  make_read_only(x, (size_t)count * sizeof *x);
  return x;
}

static const float unwritten = 777.25f;
static float* unwritten_floats(int64_t count) {
  float* x = fenced((size_t)count * sizeof *x);
  int64_t i;
  for (i = 0; i < count; ++i) x[i] = unwritten;
  return x;
}
static int is_unwritten(const float* x, int64_t count) {
  int64_t i;
  for (i = 0; i < count; ++i)
    if (x[i] != unwritten) return 0;
  return 1;
}

/* ---- the reference ----------------------------------------------------------------------------- */

enum { q_heads = 6, kv_heads = 2, group = 3, dim = 24, v_dim = 20 };

/* Token major. keys: past and chunk. */
typedef struct problem {
  int64_t past, chunk;
  float *q, *k, *v; /* k, v: past + chunk tokens */
} problem;

static problem make_problem(int64_t past, int64_t chunk) {
  problem p;
  memset(&p, 0, sizeof p);
  p.past = past, p.chunk = chunk;
  p.q = random_floats(chunk * q_heads * dim, 3.0f);
  p.k = random_floats((past + chunk) * kv_heads * dim, 1.0f);
  p.v = random_floats((past + chunk) * kv_heads * v_dim, 1.0f);
  return p;
}

/* The output of query i of head h, and its log-sum-exp. */
static double expected_row(const problem* p, int64_t i, int64_t h, double* out) {
  const int64_t keys = p->past + i + 1, kv = h / group;
  double logits[512], top = -INFINITY, sum = 0;
  int64_t t, c;
  for (t = 0; t < keys; ++t) {
    double x = 0;
    for (c = 0; c < dim; ++c)
      x += (double)p->q[(i * q_heads + h) * dim + c] * (double)p->k[(t * kv_heads + kv) * dim + c];
    x /= sqrt((double)dim);
    logits[t] = x;
    if (x > top) top = x;
  }
  for (c = 0; c < v_dim; ++c) out[c] = 0;
  for (t = 0; t < keys; ++t) {
    const double weight = exp(logits[t] - top);
    sum += weight;
    for (c = 0; c < v_dim; ++c) out[c] += weight * (double)p->v[(t * kv_heads + kv) * v_dim + c];
  }
  for (c = 0; c < v_dim; ++c) out[c] /= sum;
  return top + log(sum);
}

/* out [chunk, q_heads, v_dim], lse [q_heads, chunk] or NULL. */
static double largest_error(const problem* p, const float* out, const float* lse) {
  double worst = 0, row[v_dim];
  int64_t i, h, c;
  for (i = 0; i < p->chunk; ++i)
    for (h = 0; h < q_heads; ++h) {
      const double expected = expected_row(p, i, h, row);
      for (c = 0; c < v_dim; ++c) {
        const double error = fabs(row[c] - (double)out[(i * q_heads + h) * v_dim + c]);
        if (!(error <= worst)) worst = error;
      }
      if (lse != NULL) {
        const double error = fabs(expected - (double)lse[h * p->chunk + i]);
        if (!(error <= worst)) worst = error;
      }
    }
  return worst;
}
static const double tolerance = 2e-6;

/* The call is taken, and its result and log-sum-exp are those of the plain loops. */
#define CHECK_RIGHT(p, t)                                          \
  do {                                                             \
    CHECK_OK(quoka_attention(&(t)->call));                         \
    CHECK(largest_error(&(p), (t)->result, (t)->lse) < tolerance); \
  } while (0)

/* ---- attention --------------------------------------------------------------------------------- */

/* The tensors of a problem, the chunk apart from the past. */
typedef struct tensors {
  quoka_tensor q, k_cache, v_cache, chunk_k, chunk_v, out;
  float *result, *lse;
  quoka_attention_args call;
} tensors;

static tensors* make_call(const problem* p) {
  tensors* t = calloc(1, sizeof *t);
  t->result = unwritten_floats(p->chunk * q_heads * v_dim);
  t->lse = unwritten_floats(q_heads * p->chunk);
  t->q = quoka_token_major(p->q, QUOKA_F32, p->chunk, q_heads, dim);
  t->k_cache = quoka_token_major(p->k, QUOKA_F32, p->past, kv_heads, dim);
  t->v_cache = quoka_token_major(p->v, QUOKA_F32, p->past, kv_heads, v_dim);
  t->chunk_k =
      quoka_token_major(p->k + p->past * kv_heads * dim, QUOKA_F32, p->chunk, kv_heads, dim);
  t->chunk_v =
      quoka_token_major(p->v + p->past * kv_heads * v_dim, QUOKA_F32, p->chunk, kv_heads, v_dim);
  t->out = quoka_token_major(t->result, QUOKA_F32, p->chunk, q_heads, v_dim);
  t->call.size = sizeof t->call;
  t->call.q = &t->q, t->call.k_cache = &t->k_cache, t->call.v_cache = &t->v_cache;
  t->call.chunk_k = &t->chunk_k, t->call.chunk_v = &t->chunk_v;
  t->call.out = &t->out, t->call.lse_nat = t->lse;
  return t;
}

static void attention_is_exact(void) {
  const int64_t pasts[] = {0, 1, 37, 150}, chunks[] = {1, 5, 33};
  int i, j;
  for (i = 0; i < 4; ++i)
    for (j = 0; j < 3; ++j) {
      const problem p = make_problem(pasts[i], chunks[j]);
      tensors* t = make_call(&p);
      if (p.past == 0) t->call.k_cache = t->call.v_cache = NULL;
      CHECK_RIGHT(p, t);
      free(t);
    }
}

static void slopes_are_the_papers(void) {
  float slopes[q_heads];
  CHECK_OK(quoka_alibi_slopes(q_heads, 8.0f, slopes));
  CHECK(slopes[0] == 0.25f && slopes[3] == 0.00390625f && slopes[4] == 0.5f);
}

static void lists_that_name_no_key_are_refused(void) {
  const problem p = make_problem(20, 3);
  tensors* t = make_call(&p);
  const int32_t entries[6] = {19, 3, 7, 1, -1, 22}, counts[3] = {2, 1, 2}, too_many[3] = {2, 3, 2};
  quoka_index_lists lists;
  quoka_attention_options options;
  memset(&lists, 0, sizeof lists), memset(&options, 0, sizeof options);
  lists.size = sizeof lists, options.size = sizeof options;
  lists.entries = entries, lists.counts = counts, lists.q_len = 3, lists.k = 2;
  options.lists = &lists, t->call.options = &options;
  CHECK_OK(quoka_attention(&t->call));
  lists.counts = NULL, lists.block = 8; /* 19 names no block of 23 keys */
  CHECK_REFUSED(quoka_attention(&t->call), "19", "3");
  lists.block = 0, lists.counts = too_many;
  CHECK_REFUSED(quoka_attention(&t->call), "is 3", "which is 2");
  lists.counts = counts, lists.q_len = 2;
  CHECK_REFUSED(quoka_attention(&t->call), "is 2", "which is 3");
  lists.q_len = 3, lists.entries = NULL;
  CHECK_REFUSED(quoka_attention(&t->call), "the lists' entries is NULL", "2");
  free(t);
}

static void the_cache_may_hold_the_chunk(void) {
  const problem p = make_problem(40, 9);
  tensors* t = make_call(&p);
  t->k_cache.len = t->v_cache.len = 49;
  t->call.chunk_k = t->call.chunk_v = NULL, t->call.cache_holds_chunk = 1;
  CHECK_RIGHT(p, t);
  t->call.chunk_k = &t->chunk_k;
  CHECK_REFUSED(quoka_attention(&t->call), "cache_holds_chunk", "twice");
  t->call.chunk_k = NULL, t->k_cache.len = t->v_cache.len = 8;
  CHECK_REFUSED(quoka_attention(&t->call), "q_len is 9", "which is 8");
  free(t);
}

/* The same cache in five layouts, each a copy that ends at a fence. */
static void layouts_give_the_same_bits(void) {
  enum { past = 45, page_size = 8, pages = 7 };
  const problem p = make_problem(past, 4);
  tensors* t = make_call(&p);
  const size_t out_bytes = sizeof(float) * 4 * q_heads * v_dim;
  float* first = malloc(out_bytes);
  float *by_head = fenced(sizeof(float) * kv_heads * past * dim),
        *padded = fenced(sizeof(float) * 60 * (kv_heads * dim + 3)),
        *paged = fenced(sizeof(float) * pages * page_size * kv_heads * dim),
        *channels = fenced(sizeof(float) * kv_heads * dim * past);
  const int32_t table[] = {5, 0, 3, 6, 2, 1};
  int32_t cells[past];
  int64_t i, h, c;
  CHECK_OK(quoka_attention(&t->call));
  memcpy(first, t->result, out_bytes);
  for (i = 0; i < 60 * (kv_heads * dim + 3); ++i) padded[i] = NAN;
  for (i = 0; i < pages * page_size * kv_heads * dim; ++i) paged[i] = NAN;
  for (i = 0; i < past; ++i)
    for (h = 0; h < kv_heads; ++h)
      for (c = 0; c < dim; ++c) {
        const float x = p.k[(i * kv_heads + h) * dim + c];
        by_head[(h * past + i) * dim + c] = x;
        padded[i * (kv_heads * dim + 3) + h * dim + c] = x;
        paged[((table[i / page_size] * page_size + i % page_size) * kv_heads + h) * dim + c] = x;
        channels[(h * dim + c) * past + i] = x;
      }

  t->k_cache = quoka_head_major(by_head, QUOKA_F32, past, kv_heads, dim);
  t->k_cache.bytes = sizeof(float) * kv_heads * past * dim;
  CHECK_OK(quoka_attention(&t->call));
  CHECK(memcmp(first, t->result, out_bytes) == 0);

  t->k_cache = quoka_token_major(padded, QUOKA_F32, past, kv_heads, dim);
  t->k_cache.capacity = 60, t->k_cache.step_bytes = (kv_heads * dim + 3) * sizeof(float);
  t->k_cache.bytes = sizeof(float) * 60 * (kv_heads * dim + 3);
  CHECK_OK(quoka_attention(&t->call));
  t->k_cache.bytes += 1000; /* a larger buffer is as good */
  CHECK_OK(quoka_attention(&t->call));
  CHECK(memcmp(first, t->result, out_bytes) == 0);

  t->k_cache = quoka_token_major(paged, QUOKA_F32, page_size, kv_heads, dim);
  t->k_cache.batch = pages, t->k_cache.table = table, t->k_cache.table_count = 6,
  t->k_cache.tokens = past;
  CHECK_OK(quoka_attention(&t->call));
  CHECK(memcmp(first, t->result, out_bytes) == 0);

  /* Tokens last to first in strides, first to last in a list. */
  t->k_cache = quoka_token_major(p.k, QUOKA_F32, past, kv_heads, dim);
  t->k_cache.layout = QUOKA_STRIDED;
  t->k_cache.data = p.k + (past - 1) * kv_heads * dim;
  t->k_cache.strides[0] = 0, t->k_cache.strides[1] = dim * sizeof(float);
  t->k_cache.strides[2] = -(int64_t)(kv_heads * dim * sizeof(float));
  for (i = 0; i < past; ++i) cells[i] = (int32_t)(past - 1 - i);
  t->k_cache.cells = cells, t->k_cache.cells_count = past;
  CHECK_OK(quoka_attention(&t->call));
  CHECK(memcmp(first, t->result, out_bytes) == 0);

  t->k_cache = quoka_head_major(channels, QUOKA_F32, past, kv_heads, dim);
  t->k_cache.layout = QUOKA_STRIDED, t->k_cache.channel_step = past * sizeof(float);
  t->k_cache.strides[1] = dim * past * sizeof(float), t->k_cache.strides[2] = sizeof(float);
  t->k_cache.bytes = sizeof(float) * kv_heads * dim * past;
  CHECK_OK(quoka_attention(&t->call));
  CHECK(memcmp(first, t->result, out_bytes) == 0);
  free(first), free(t);
}

static void storage_is_read_and_written(void) {
  problem p = make_problem(30, 3);
  tensors* t = make_call(&p);
  uint16_t *k = fenced(2 * 33 * kv_heads * dim), *out = fenced(2 * 3 * q_heads * v_dim);
  float *rounded = fenced(4 * 33 * kv_heads * dim), result[3 * q_heads * v_dim];
  int64_t i;
  for (i = 0; i < 33 * kv_heads * dim; ++i) { /* bfloat16: the first half of a float */
    uint32_t bits;
    memcpy(&bits, &p.k[i], 4);
    k[i] = (uint16_t)(bits >> 16);
    bits &= 0xffff0000u;
    memcpy(&rounded[i], &bits, 4);
  }
  p.k = rounded;
  t->k_cache = quoka_token_major(k, QUOKA_BF16, 30, kv_heads, dim);
  t->chunk_k = quoka_token_major(k + 30 * kv_heads * dim, QUOKA_BF16, 3, kv_heads, dim);
  t->out = quoka_token_major(out, QUOKA_BF16, 3, q_heads, v_dim);
  CHECK_OK(quoka_attention(&t->call));
  for (i = 0; i < 3 * q_heads * v_dim; ++i) {
    const uint32_t bits = (uint32_t)out[i] << 16;
    memcpy(&result[i], &bits, 4);
  }
  CHECK(largest_error(&p, result, NULL) < 1.0 / 256);
  CHECK(largest_error(&p, result, NULL) > 1e-5); /* it was rounded */
  free(t);
}

/* ---- threads ----------------------------------------------------------------------------------- */

typedef struct callers {
  int32_t leave_out, status;
  int32_t last_worker; /* under which the last task is run, if not 0 */
  int64_t last_task;   /* what is run in its place, if not 0 */
  int64_t runs;
} callers;
static int32_t run_backwards(void* context, int64_t tasks, quoka_task task, void* argument) {
  callers* of = context;
  int64_t i;
  ++of->runs;
  for (i = tasks; i-- > of->leave_out;)
    task(argument, i == 0 && of->last_task != 0 ? of->last_task : i,
         i == 0 && of->last_worker != 0 ? of->last_worker : (int32_t)(i % 3));
  return of->status;
}

static void executors(void) {
  const problem p = make_problem(90, 12);
  tensors* t = make_call(&p);
  const size_t out_bytes = sizeof(float) * 12 * q_heads * v_dim;
  float* first = malloc(out_bytes);
  callers of;
  quoka_executor executor;
  quoka_threads *own = NULL, *theirs = NULL, *none = NULL;
  quoka_workspace* workspace = NULL;
  memset(&of, 0, sizeof of), memset(&executor, 0, sizeof executor);
  executor.size = sizeof executor, executor.context = &of, executor.workers = 3,
  executor.run = run_backwards;
  CHECK_OK(quoka_attention(&t->call));
  memcpy(first, t->result, out_bytes);

  CHECK_OK(quoka_threads_create(3, &own));
  CHECK_OK(quoka_workspace_create(&workspace));
  t->call.threads = own, t->call.workspace = workspace;
  memset(t->result, 0, out_bytes);
  CHECK_OK(quoka_attention(&t->call));
  CHECK(memcmp(first, t->result, out_bytes) == 0);

  CHECK_OK(quoka_threads_of_caller(&executor, &theirs));
  memset(&executor, 0xff, sizeof executor); /* it was copied */
  t->call.threads = theirs;
  memset(t->result, 0, out_bytes);
  CHECK_OK(quoka_attention(&t->call));
  CHECK(memcmp(first, t->result, out_bytes) == 0 && of.runs > 0);

  of.status = 5;
  CHECK(quoka_attention(&t->call) == QUOKA_FAILED && strstr(quoka_message(), "returned 5") != NULL);
  of.status = 0, of.leave_out = 1;
  CHECK(quoka_attention(&t->call) == QUOKA_FAILED &&
        strstr(quoka_message(), "but was given") != NULL);
  of.leave_out = 0;
  /* The outputs of other tasks are written by then: it is not an argument's fault. */
#define CHECK_FAILED(first, second)                                                           \
  do {                                                                                        \
    memset(t->result, 0, out_bytes);                                                          \
    CHECK(quoka_attention(&t->call) == QUOKA_FAILED);                                         \
    CHECK(strstr(quoka_message(), first) != NULL && strstr(quoka_message(), second) != NULL); \
  } while (0)
  of.last_worker = 3;
  CHECK_FAILED("worker is 3", "which is 3");
  of.last_worker = -1;
  CHECK_FAILED("worker is -1", "which is 3");
  of.last_worker = 0, of.last_task = 1; /* twice, and task 0 not at all */
  CHECK_FAILED("twice", "not at all");
  of.last_task = 1000000;
  CHECK_FAILED("task is 1000000", "which is");
  of.last_task = -1;
  CHECK_FAILED("task is -1", "which is");
  of.last_task = 0;
#undef CHECK_FAILED
  CHECK_OK(quoka_attention(&t->call));
  CHECK(memcmp(first, t->result, out_bytes) == 0);

  CHECK_REFUSED(quoka_threads_create(0, &none), "quoka: workers is 0", "1");
  CHECK_REFUSED(quoka_threads_create(1, NULL), "threads", "NULL");
  memset(&executor, 0, sizeof executor), executor.size = sizeof executor;
  CHECK_REFUSED(quoka_threads_of_caller(&executor, &none), "workers is 0", "1");
  executor.workers = 1;
  CHECK_REFUSED(quoka_threads_of_caller(&executor, &none), "run", "NULL");
  CHECK_REFUSED(quoka_threads_of_caller(NULL, &none), "executor", "NULL");
  CHECK(none == NULL);
  quoka_threads_free(own), quoka_threads_free(theirs), quoka_threads_free(NULL);
  quoka_workspace_free(workspace), quoka_workspace_free(NULL);
  free(first), free(t);
}

/* ---- selection --------------------------------------------------------------------------------- */

static void selections_are_of_the_caller(void) {
  const problem p = make_problem(20, 2);
  tensors* t = make_call(&p);
  const int32_t positions[] = {0, 4, 19, 7};
  const int32_t twice[] = {4, 4, 19, 7}, beyond[] = {0, 4, 20, 7};
  const int64_t counts[] = {3, 1}, too_many[] = {21, 1};
  quoka_selection* keep = NULL;
  const int32_t* row = NULL;
  int64_t count = -1, batch = -1, heads = -1, kv_len = -1;
  int32_t is_all = -1;
  CHECK_OK(quoka_selection_create(&keep));
  CHECK_OK(quoka_selection_set(keep, 1, kv_heads, 20, positions, counts));
  CHECK_OK(quoka_selection_shape(keep, &batch, &heads, &kv_len, &is_all));
  CHECK(batch == 1 && heads == kv_heads && kv_len == 20 && is_all == 0);
  CHECK_OK(quoka_selection_row(keep, 0, 0, &row, &count));
  CHECK(count == 3 && row[0] == 0 && row[1] == 4 && row[2] == 19);
  CHECK_OK(quoka_selection_row(keep, 0, 1, &row, &count));
  CHECK(count == 1 && row[0] == 7);
  t->call.selection = keep;
  CHECK_OK(quoka_attention(&t->call));

  CHECK_REFUSED(quoka_selection_set(keep, 1, kv_heads, 20, twice, counts), "is 4", "which is 4");
  CHECK_REFUSED(quoka_selection_set(keep, 1, kv_heads, 20, beyond, counts), "is 20", "which is 19");
  CHECK_REFUSED(quoka_selection_set(keep, 1, kv_heads, 20, positions, too_many), "is 21",
                "which is 20");
  CHECK_REFUSED(quoka_selection_set(keep, 1, kv_heads, 20, NULL, counts), "positions", "NULL");
  CHECK_REFUSED(quoka_selection_set(keep, 1, 0, 20, positions, counts), "heads is 0", "1");
  CHECK_REFUSED(quoka_selection_row(keep, 1, 0, &row, &count), "sequence is 1", "which is 0");
  CHECK_REFUSED(quoka_selection_row(keep, 0, 2, &row, &count), "the head is 2", "which is 1");
  CHECK_REFUSED(quoka_selection_row(keep, 0, -1, &row, &count), "the head is -1", "0");
  CHECK_REFUSED(quoka_selection_row(NULL, 0, 0, &row, &count), "selection", "NULL");
  CHECK_OK(quoka_selection_row(keep, 0, 1, &row, &count)); /* it is as it was */
  CHECK(count == 1 && row[0] == 7);
  t->k_cache.len = t->v_cache.len = 19;
  CHECK_REFUSED(quoka_attention(&t->call), "kv_len is 20", "which is 19");
  quoka_selection_free(keep), quoka_selection_free(NULL);
  free(t);
}

/* The keys of each head, on average; -1: not a whole number, or not ascending. */
static int64_t mean_count(const quoka_selection* keep) {
  int64_t count = 0, sum = 0, heads = 0, h, i;
  if (quoka_selection_shape(keep, NULL, &heads, NULL, NULL) != QUOKA_OK) return -1;
  for (h = 0; h < heads; ++h) {
    const int32_t* row;
    if (quoka_selection_row(keep, 0, h, &row, &count) != QUOKA_OK) return -1;
    sum += count;
    if (row == NULL) continue;
    for (i = 1; i < count; ++i)
      if (row[i] <= row[i - 1]) return -1;
  }
  return heads == 0 || sum % heads != 0 ? -1 : sum / heads;
}

static void presets_select_within_their_budget(void) {
  const problem p = make_problem(300, 8);
  tensors* t = make_call(&p);
  quoka_select_args select;
  quoka_selection_options how;
  quoka_attention_options options;
  quoka_selection* keep = NULL;
  quoka_state* state = NULL;
  const float slopes[q_heads] = {0};
  const int32_t* row;
  int64_t count;
  float share;
  memset(&select, 0, sizeof select), memset(&how, 0, sizeof how),
      memset(&options, 0, sizeof options);
  select.size = sizeof select, how.size = sizeof how, options.size = sizeof options;
  select.q = &t->q, select.k_cache = &t->k_cache;
  CHECK_OK(quoka_selection_create(&keep));
  CHECK_OK(quoka_select(&select, keep)); /* recommended: all of a short past */
  CHECK(mean_count(keep) == 300);
  select.how = &how;
  how.preset = QUOKA_BALANCED;
  CHECK_OK(quoka_select(&select, keep)); /* likewise */
  CHECK(mean_count(keep) == 300);
  how.preset = QUOKA_RECOMMENDED;
  how.budget_keys = 40;
  CHECK_OK(quoka_select(&select, keep));
  CHECK(mean_count(keep) == 40);
  how.preset = QUOKA_PAPER;
  CHECK_OK(quoka_select(&select, keep));
  CHECK(mean_count(keep) == 40);
  how.budget_keys = 0, how.budget_share = 0.1;
  how.keep_first = 2, how.keep_last = 3;
  CHECK_OK(quoka_select(&select, keep));
  CHECK(mean_count(keep) == 30);
  CHECK_OK(quoka_selection_row(keep, 0, 1, &row, &count));
  CHECK(row[0] == 0 && row[1] == 1 && row[27] == 297 && row[28] == 298 && row[29] == 299);
  t->call.selection = keep;
  CHECK_OK(quoka_attention(&t->call));
  CHECK(largest_error(&p, t->result, NULL) > 1e-3); /* not all keys were attended to */
  CHECK_OK(quoka_selection_kept_share(keep, 0, 1, &share));
  CHECK(share != share); /* the paper's does not tell */
  how.preset = QUOKA_RECOMMENDED;
  CHECK_OK(quoka_select(&select, keep));
  CHECK_OK(quoka_selection_kept_share(keep, 0, 1, &share));
  CHECK(share > 0.1f && share < 1.0f);
  select.chunk_k = &t->chunk_k; /* what goes to the chunk's own keys does not count as lost */
  {
    float of_all;
    CHECK_OK(quoka_select(&select, keep));
    CHECK_OK(quoka_selection_kept_share(keep, 0, 1, &of_all));
    CHECK(of_all > share && of_all < 1.0f);
    /* the same call on a cache that holds the chunk */
    quoka_tensor all_k = t->k_cache;
    float in_cache;
    all_k.len += t->chunk_k.len;
    select.k_cache = &all_k, select.chunk_k = NULL, select.cache_holds_chunk = 1;
    CHECK_OK(quoka_select(&select, keep));
    CHECK_OK(quoka_selection_kept_share(keep, 0, 1, &in_cache));
    CHECK(in_cache == of_all && mean_count(keep) == 30);
    select.chunk_k = &t->chunk_k;
    CHECK_REFUSED(quoka_select(&select, keep), "cache_holds_chunk", "twice");
    select.chunk_k = NULL, all_k.len = 7;
    CHECK_REFUSED(quoka_select(&select, keep), "q_len is 8", "which is 7");
    select.k_cache = &t->k_cache, select.chunk_k = &t->chunk_k, select.cache_holds_chunk = 0;
  }
  --t->chunk_k.len;
  CHECK_REFUSED(quoka_select(&select, keep), "chunk_k's len is 7", "8");
  ++t->chunk_k.len;
  select.chunk_k = NULL;
  CHECK_REFUSED(quoka_selection_kept_share(keep, 0, -1, &share), "the head is -1", "0");
  CHECK_REFUSED(quoka_selection_kept_share(keep, 0, 0, NULL), "share", "NULL");

  how.budget_keys = 7;
  CHECK_REFUSED(quoka_select(&select, keep), "budget_keys is 7", "budget_share is 0.1");
  how.budget_keys = 0, how.budget_share = 1.5;
  CHECK_REFUSED(quoka_select(&select, keep), "1.5", "(0, 1]");
  how.budget_share = 0, how.budget_keys = -4;
  CHECK_REFUSED(quoka_select(&select, keep), "budget_keys is -4", "0");
  how.budget_keys = 20, how.preset = 3;
  CHECK_REFUSED(quoka_select(&select, keep), "preset is 3", "which is 2");
  how.preset = QUOKA_RECOMMENDED, how.queries = -1;
  CHECK_REFUSED(quoka_select(&select, keep), "queries is -1", "0");
  how.queries = 0;
  options.sliding_window = 64, select.options = &options;
  CHECK_REFUSED(quoka_select(&select, keep), "64", "window");
  options.sliding_window = 0, options.alibi_slopes.data = slopes;
  options.alibi_slopes.count = q_heads;
  CHECK_REFUSED(quoka_select(&select, keep), "alibi_slopes", "or select by QUOKA_PAPER");
  select.options = NULL;
  CHECK_REFUSED(quoka_select(&select, NULL), "selection", "NULL");
  CHECK_REFUSED(quoka_select(NULL, keep), "args is NULL", "quoka");

  /* A state selects what is selected without one. */
  how.preset = QUOKA_PAPER, how.keep_first = how.keep_last = 0;
  CHECK_OK(quoka_state_create(&how, &state));
  t->k_cache.len = 200;
  CHECK_OK(quoka_state_appended(state, &t->k_cache, 300, NULL));
  t->k_cache.len = 300;
  CHECK_OK(quoka_state_appended(state, &t->k_cache, 0, NULL));
  CHECK_OK(quoka_select(&select, keep));
  {
    quoka_selection* by_state = NULL;
    int64_t h;
    CHECK_OK(quoka_selection_create(&by_state));
    select.state = state;
    CHECK_REFUSED(quoka_select(&select, by_state), "state", "options");
    select.how = NULL;
    CHECK_OK(quoka_select(&select, by_state));
    for (h = 0; h < kv_heads; ++h) {
      const int32_t* other;
      int64_t others;
      CHECK_OK(quoka_selection_row(keep, 0, h, &row, &count));
      CHECK_OK(quoka_selection_row(by_state, 0, h, &other, &others));
      CHECK(count == 20 && others == 20 && memcmp(row, other, 20 * sizeof *row) == 0);
    }
    t->k_cache.len = 100; /* shorter, unheard */
    CHECK_REFUSED(quoka_select(&select, by_state), "is 300",
                  "(quoka_state_truncate() was not called), which is 100");
    CHECK_OK(quoka_state_truncate(state, 100));
    CHECK_OK(quoka_select(&select, by_state));
    CHECK_REFUSED(quoka_state_truncate(state, -1), "is -1", "0");
    CHECK_REFUSED(quoka_state_truncate(NULL, 0), "state", "NULL");
    quoka_selection_free(by_state);
  }
  quoka_state_free(state), quoka_state_free(NULL), quoka_selection_free(keep);
  free(t);
}

static void masks_hide_keys_from_selection(void) {
  const problem p = make_problem(120, 4);
  tensors* t = make_call(&p);
  quoka_select_args select;
  quoka_selection_options how;
  quoka_attention_options options;
  quoka_mask mask;
  quoka_selection* keep = NULL;
  unsigned char* bytes = fenced(4 * 124);
  int64_t i, h, count, all = 0;
  memset(&select, 0, sizeof select), memset(&how, 0, sizeof how),
      memset(&options, 0, sizeof options);
  memset(&mask, 0, sizeof mask);
  select.size = sizeof select, how.size = sizeof how, options.size = sizeof options,
  mask.size = sizeof mask;
  for (i = 0; i < 4 * 124; ++i) bytes[i] = (unsigned char)(i % 124 >= 50); /* padding on the left */
  bytes[3] = 1; /* of which one query sees key 3 */
  mask.data = bytes, mask.type = QUOKA_MASK_BYTES, mask.q_len = 4, mask.keys = 124;
  options.mask = &mask, how.budget_keys = 10;
  select.q = &t->q, select.k_cache = &t->k_cache, select.how = &how, select.options = &options;
  CHECK_OK(quoka_selection_create(&keep));
  CHECK_OK(quoka_select(&select, keep));
  for (h = 0; h < kv_heads; ++h) {
    const int32_t* row;
    CHECK_OK(quoka_selection_row(keep, 0, h, &row, &count));
    CHECK(count >= 1 && row[0] == 3);
    if (count > 1) CHECK(row[1] >= 50);
    all += count;
  }
  CHECK(all == 11 * kv_heads); /* they share a budget of 10 each, and key 3 comes beside it */
  quoka_selection_free(keep);
  free(t);
}

/* ---- cache and layer --------------------------------------------------------------------------- */

static quoka_tensor slice(const float* x, int64_t begin, int64_t len, int64_t heads,
                          int64_t channels) {
  return quoka_token_major(x + begin * heads * channels, QUOKA_F32, len, heads, channels);
}

/* Two index heads of one channel each: every key's score is known, and the best ones are listed. */
static void index_heads_choose_keys(void) {
  enum { queries = 2, keys = 7 };
  const float k[keys] = {3, -5, 1, 4, -2, 6, 5};
  const float q[2 * queries] = {1, -1, 2, -1}; /* [head, query] */
  const float weights[2 * queries] = {1, 2, 0.5f,
                                      1}; /* of head 0: q 1 and -1; of head 1: 2 and -1 */
  quoka_indexer_options options;
  quoka_index_args call;
  quoka_index_lists lists;
  quoka_indexer* indexer = NULL;
  quoka_tensor tq, tk;
  memset(&options, 0, sizeof options), memset(&call, 0, sizeof call);
  memset(&lists, 0, sizeof lists);
  options.size = sizeof options, call.size = sizeof call, lists.size = sizeof lists;
  options.k = 3;
  tq = quoka_head_major(q, QUOKA_F32, queries, 2, 1),
  tk = quoka_head_major(k, QUOKA_F32, keys, 1, 1);
  call.q = &tq, call.k = &tk, call.weights = weights;
  CHECK_OK(quoka_indexer_create(&options, &indexer));
  CHECK_OK(quoka_index_keys(indexer, &call, &lists));
  CHECK(lists.batch == 1 && lists.heads == 1 && lists.q_len == queries && lists.k == 3 &&
        lists.block == 1);
  /* Query 0 sees keys 0 to 5 and scores positive ones; query 1 sees all and scores negative ones. Others are 0. */
  CHECK(lists.entries[0] == 0 && lists.entries[1] == 3 && lists.entries[2] == 5);
  CHECK(lists.entries[3] == 0 && lists.entries[4] == 1 && lists.entries[5] == 4);
  call.k = NULL;
  CHECK_REFUSED(quoka_index_keys(indexer, &call, &lists), "k", "NULL");
  tk.len = 1, call.k = &tk;
  CHECK_REFUSED(quoka_index_keys(indexer, &call, &lists), "q_len is 2", "which is 1");
  CHECK_REFUSED(quoka_index_keys(NULL, &call, &lists), "indexer", "NULL");
  lists.size = 8;
  CHECK_REFUSED(quoka_index_keys(indexer, &call, &lists), "size is 8", "at least");
  quoka_indexer_free(indexer);
  options.k = -1, indexer = NULL;
  CHECK_REFUSED(quoka_indexer_create(&options, &indexer), "k is -1", "1");
  CHECK(indexer == NULL);
  quoka_indexer_free(NULL);
}

static void a_cache_keeps_what_it_is_given(void) {
  const problem p = make_problem(50, 6);
  tensors* t = make_call(&p);
  quoka_cache_options options;
  quoka_cache* cache = NULL;
  quoka_tensor k = slice(p.k, 0, 30, kv_heads, dim), v = slice(p.v, 0, 30, kv_heads, v_dim);
  quoka_tensor kept_k, kept_v;
  memset(&options, 0, sizeof options), memset(&kept_k, 0, sizeof kept_k);
  options.size = sizeof options;
  CHECK_REFUSED(quoka_cache_create(&options, &cache), "kv_heads is 0", "1");
  CHECK(cache == NULL);
  options.kv_heads = kv_heads, options.head_dim = dim, options.v_dim = v_dim;
  options.k_type = 9;
  CHECK_REFUSED(quoka_cache_create(&options, &cache), "k_type is 9", "which is 7");
  options.k_type = QUOKA_F32;
  CHECK_OK(quoka_cache_create(&options, &cache));
  CHECK(quoka_cache_len(cache) == 0 && quoka_cache_len(NULL) == -1);
  CHECK_OK(quoka_cache_append(cache, &k, &v, NULL));
  k = slice(p.k, 30, 20, kv_heads, dim), v = slice(p.v, 30, 20, kv_heads, v_dim);
  CHECK_OK(quoka_cache_append(cache, &k, &v, NULL));
  CHECK(quoka_cache_len(cache) == 50);
  v.len = 19;
  CHECK_REFUSED(quoka_cache_append(cache, &k, &v, NULL), "19", "20");
  CHECK(quoka_cache_len(cache) == 50);
  CHECK_REFUSED(quoka_cache_view(cache, &kept_k, &kept_v), "k's size is 0", "at least");
  kept_k.size = kept_v.size = sizeof kept_k;
  memset((char*)&kept_k + sizeof(size_t), 0xff, sizeof kept_k - sizeof(size_t)); /* only written */
  memset((char*)&kept_v + sizeof(size_t), 0xff, sizeof kept_v - sizeof(size_t));
  CHECK_OK(quoka_cache_view(cache, &kept_k, &kept_v));
  CHECK(kept_k.len == 50 && kept_k.heads == kv_heads && kept_k.dim == dim && kept_v.dim == v_dim);
  t->call.k_cache = &kept_k, t->call.v_cache = &kept_v;
  CHECK_RIGHT(p, t);
  CHECK_OK(quoka_cache_reserve(cache, 500));
  CHECK_OK(quoka_cache_view(cache, &kept_k, &kept_v));
  CHECK_RIGHT(p, t);
  CHECK_REFUSED(quoka_cache_truncate(cache, 51), "is 51", "which is 50");
  CHECK_REFUSED(quoka_cache_reserve(cache, -1), "is -1", "0");
  CHECK_OK(quoka_cache_truncate(cache, 10));
  CHECK(quoka_cache_len(cache) == 10);
  quoka_cache_free(cache), quoka_cache_free(NULL);
  free(t);
}

static void a_layer_prefills(void) {
  const problem p = make_problem(0, 90); /* all of it is a chunk of the reference */
  float *out = unwritten_floats(90 * q_heads * v_dim), *lse = unwritten_floats(q_heads * 30);
  quoka_cache_options cache;
  quoka_selection_options how;
  quoka_attention_options options;
  quoka_prefill *dense = NULL, *selecting = NULL;
  quoka_selection* keep = NULL;
  quoka_threads* threads = NULL;
  quoka_mask mask;
  int64_t begin, kv_len = 0;
  int32_t is_all = -1;
  memset(&cache, 0, sizeof cache), memset(&how, 0, sizeof how), memset(&options, 0, sizeof options);
  memset(&mask, 0, sizeof mask);
  cache.size = sizeof cache, how.size = sizeof how, options.size = sizeof options,
  mask.size = sizeof mask;
  cache.kv_heads = kv_heads, cache.head_dim = dim, cache.v_dim = v_dim;
  how.budget_keys = 16;
  CHECK_OK(quoka_threads_create(2, &threads));
  CHECK_OK(quoka_selection_create(&keep));
  CHECK_REFUSED(quoka_prefill_create(5, &cache, NULL, NULL, &dense), "q_heads is 5", "which is 2");
  mask.data = out, mask.q_len = 1, mask.keys = 1, options.mask = &mask;
  CHECK(quoka_prefill_create(q_heads, &cache, &options, NULL, &dense) == QUOKA_INVALID);
  CHECK(dense == NULL);
  CHECK_OK(quoka_prefill_create(q_heads, &cache, NULL, NULL, &dense));
  CHECK_OK(quoka_prefill_create(q_heads, &cache, NULL, &how, &selecting));
  CHECK_OK(quoka_prefill_reserve(dense, 90));
  for (begin = 0; begin < 90; begin += 30) {
    const quoka_tensor q = slice(p.q, begin, 30, q_heads, dim),
                       k = slice(p.k, begin, 30, kv_heads, dim),
                       v = slice(p.v, begin, 30, kv_heads, v_dim),
                       to = slice(out, begin, 30, q_heads, v_dim);
    CHECK_OK(quoka_prefill_forward(dense, &q, &k, &v, &to, lse, threads));
  }
  CHECK(largest_error(&p, out, NULL) < tolerance);
  {
    double row[v_dim];
    CHECK(fabs(expected_row(&p, 89, 5, row) - (double)lse[5 * 30 + 29]) < tolerance);
  }
  CHECK(quoka_prefill_len(dense) == 90 && quoka_prefill_len(NULL) == -1);
  CHECK_OK(quoka_prefill_selection(dense, keep));
  CHECK_OK(quoka_selection_shape(keep, NULL, NULL, &kv_len, &is_all));
  CHECK(kv_len == 60 && is_all == 1);
  CHECK_REFUSED(quoka_prefill_truncate(dense, 91), "is 91", "which is 90");
  CHECK_OK(quoka_prefill_truncate(dense, 60));
  {
    const quoka_tensor q = slice(p.q, 60, 30, q_heads, dim), k = slice(p.k, 60, 30, kv_heads, dim),
                       v = slice(p.v, 60, 30, kv_heads, v_dim),
                       first_k = slice(p.k, 0, 60, kv_heads, dim),
                       first_v = slice(p.v, 0, 60, kv_heads, v_dim);
    quoka_tensor to = slice(out, 60, 30, q_heads, v_dim);
    to.len = 29;
    CHECK_REFUSED(quoka_prefill_forward(dense, &q, &k, &v, &to, NULL, NULL), "29", "30");
    CHECK(quoka_prefill_len(dense) == 60);
    to.len = 30;
    CHECK_OK(quoka_prefill_forward(dense, &q, &k, &v, &to, NULL, NULL));
    CHECK(largest_error(&p, out, NULL) < tolerance);
    CHECK_OK(quoka_prefill_append(selecting, &first_k, &first_v, NULL)); /* a saved prefix */
    CHECK_OK(quoka_prefill_forward(selecting, &q, &k, &v, &to, NULL, threads));
    CHECK(largest_error(&p, out, NULL) > 1e-3);
    CHECK_OK(quoka_prefill_selection(selecting, keep));
    CHECK(mean_count(keep) == 16 && quoka_prefill_len(selecting) == 90);
    CHECK_REFUSED(quoka_prefill_forward(NULL, &q, &k, &v, &to, NULL, NULL), "layer", "NULL");
  }
  quoka_prefill_free(dense), quoka_prefill_free(selecting), quoka_prefill_free(NULL);
  quoka_selection_free(keep), quoka_threads_free(threads);
}

/* ---- what is refused --------------------------------------------------------------------------- */

/* The same tensor of one sequence, token by token, by its strides. */
static void strided(quoka_tensor* x) {
  x->layout = QUOKA_STRIDED;
  x->strides[1] = x->dim * (int64_t)sizeof(float), x->strides[2] = x->heads * x->strides[1];
}

static void bad_calls_write_nothing(void) {
  const problem p = make_problem(25, 3);
  const tensors* good = make_call(&p);
  tensors* t = make_call(&p);
  const int64_t out_count = 3 * q_heads * v_dim;
  const int32_t table[] = {0, 1, 7};
  const int32_t cells[] = {0, 25};
  quoka_attention_options options;
  quoka_mask mask;
  quoka_index_lists lists;
  float sinks[q_heads] = {0};
  int shift;
  memset(&options, 0, sizeof options), memset(&mask, 0, sizeof mask);
  memset(&lists, 0, sizeof lists);
  options.size = sizeof options, mask.size = sizeof mask, lists.size = sizeof lists;
#define ALMOST_GOOD(change, first, second)                                               \
  do {                                                                                   \
    float *result = t->result, *lse = t->lse;                                            \
    *t = *good;                                                                          \
    t->result = result, t->lse = lse;                                                    \
    t->out.data = result, t->call.lse_nat = lse;                                         \
    t->call.q = &t->q, t->call.k_cache = &t->k_cache, t->call.v_cache = &t->v_cache;     \
    t->call.chunk_k = &t->chunk_k, t->call.chunk_v = &t->chunk_v, t->call.out = &t->out; \
    change;                                                                              \
    CHECK_REFUSED(quoka_attention(&t->call), first, second);                             \
    CHECK(is_unwritten(result, out_count) && is_unwritten(lse, q_heads * 3));            \
  } while (0)
  CHECK_REFUSED(quoka_attention(NULL), "args is NULL", "quoka");
  ALMOST_GOOD(t->call.q = NULL, "q is NULL", "quoka");
  ALMOST_GOOD(t->call.out = NULL, "out is NULL", "quoka");
  /* In the names of c.h: the field that is NULL, and what to set. */
  ALMOST_GOOD(t->call.v_cache = NULL, "v_cache is NULL", "k_cache is not");
  ALMOST_GOOD(t->call.k_cache = NULL, "k_cache is NULL", "v_cache is not");
  ALMOST_GOOD(t->call.chunk_v = NULL, "chunk_v is NULL", "chunk_k is not");
  ALMOST_GOOD(t->call.chunk_k = NULL, "chunk_k is NULL", "chunk_v is not");
  ALMOST_GOOD((t->call.k_cache = t->call.v_cache = t->call.chunk_k = t->call.chunk_v = NULL),
              "k_cache and chunk_k are NULL", "no keys");
  ALMOST_GOOD((t->call.k_cache = t->call.v_cache = t->call.chunk_k = t->call.chunk_v = NULL,
               t->call.cache_holds_chunk = 1),
              "k_cache is NULL", "cache_holds_chunk");
  ALMOST_GOOD((t->call.chunk_k = t->call.chunk_v = NULL), "cache_holds_chunk says",
              "has_q_offset or bidirectional");
  ALMOST_GOOD(t->q.data = NULL, "q's data is NULL", "len is 3");
  ALMOST_GOOD(t->v_cache.data = NULL, "v_cache's data is NULL", "len is 25");
  ALMOST_GOOD(t->out.data = NULL, "out's data is NULL", "len is 3");
  ALMOST_GOOD(t->call.past_position = -1, "past_position is -1", "0");
  ALMOST_GOOD((t->chunk_k.len = t->chunk_v.len = 2), "chunk_k's len is 2", "3");
  ALMOST_GOOD(t->k_cache.heads = 1, "v_cache's heads is 2", "1");
  mask.q_len = 3, mask.keys = 28, options.mask = &mask;
  ALMOST_GOOD(t->call.options = &options, "the mask's data is NULL", "q_len is 3");
  memset(&mask, 0, sizeof mask), mask.size = sizeof mask, options.mask = NULL;
  lists.q_len = 3, lists.k = 1, options.lists = &lists;
  ALMOST_GOOD(t->call.options = &options, "the lists' entries is NULL", "k is 1");
  memset(&lists, 0, sizeof lists), lists.size = sizeof lists, options.lists = NULL;
  ALMOST_GOOD(t->q.type = -1, "q's type is -1", "0");
  ALMOST_GOOD(t->q.type = 8, "q's type is 8", "which is 7");
  ALMOST_GOOD(t->q.layout = 3, "q's layout is 3", "which is 2");
  ALMOST_GOOD(t->q.heads = 0, "q's heads is 0", "1");
  ALMOST_GOOD(t->q.heads = 5, "5", "2");
  ALMOST_GOOD(t->q.dim = 0, "q's dim is 0", "1");
  ALMOST_GOOD(t->q.dim = INT64_MAX, "q's dim is 9223372036854775807", "2147483647");
  ALMOST_GOOD(t->k_cache.dim = 23, "23", "24");
  ALMOST_GOOD(t->k_cache.len = -1, "k_cache's len is -1", "0");
  ALMOST_GOOD(t->k_cache.len = 24, "24", "25");
  ALMOST_GOOD(t->k_cache.batch = 2, "2", "1");
  ALMOST_GOOD(t->k_cache.batch = -1, "k_cache's batch is -1", "1");
  ALMOST_GOOD(t->k_cache.capacity = 24, "k_cache: a layout's len is 25", "24");
  ALMOST_GOOD(t->k_cache.step_bytes = 8, "step_bytes is 8", "192");
  ALMOST_GOOD(t->k_cache.bytes = 4799, "k_cache", "4800");
  ALMOST_GOOD((t->k_cache.layout = QUOKA_STRIDED, t->k_cache.strides[2] = 192,
               t->k_cache.strides[1] = 96, t->k_cache.bytes = 4799),
              "4800", "4799");
  ALMOST_GOOD(t->k_cache.channel_step = -4, "channel_step is -4", "0");
  /* Products beyond what 64 bits count. */
  for (shift = 58; shift < 63; ++shift) {
    const int64_t far = INT64_C(1) << shift;
    ALMOST_GOOD((strided(&t->k_cache), t->k_cache.channel_step = far, t->k_cache.bytes = 4800),
                "stride of channels", "24");
    ALMOST_GOOD((strided(&t->k_cache), t->k_cache.strides[2] = far), "stride of len", "25");
    ALMOST_GOOD((strided(&t->k_cache), t->k_cache.strides[1] = -far), "stride of heads", "2");
    ALMOST_GOOD((strided(&t->k_cache), t->k_cache.batch = 5, t->k_cache.strides[0] = far), "batch",
                "5");
    ALMOST_GOOD(t->k_cache.step_bytes = far, "k_cache", "");
    ALMOST_GOOD(
        (t->k_cache.type = QUOKA_I8, t->k_cache.scales = sinks, t->k_cache.scales_step = far),
        "scales's stride of heads", "2");
    ALMOST_GOOD((t->call.lse_strides[2] = far, t->call.lse_strides[1] = 1),
                "lse_nat's stride of len", "3");
    ALMOST_GOOD((t->k_cache.table = table, t->k_cache.table_count = far, t->k_cache.tokens = 25),
                "count of the table", "2147483647");
    ALMOST_GOOD((t->k_cache.table = table, t->k_cache.table_count = 1, t->k_cache.tokens = far),
                "paged sequence", "2147483647");
    ALMOST_GOOD((t->k_cache.cells = cells, t->k_cache.cells_count = far),
                "count of the list of cells", "2147483647");
    mask.data = p.k, mask.q_len = 3, mask.keys = 28, options.mask = &mask;
    mask.strides[2] = far;
    ALMOST_GOOD(t->call.options = &options, "mask's stride of q_len", "3");
    mask.strides[2] = 0, mask.heads = q_heads, mask.strides[1] = -far;
    ALMOST_GOOD(t->call.options = &options, "mask's stride of heads", "6");
    mask.heads = 0, mask.strides[1] = 0, options.mask = NULL;
  }
  ALMOST_GOOD(
      (t->k_cache.batch = t->k_cache.heads = t->k_cache.len = INT32_MAX, t->k_cache.strides[0] = 0),
      "k_cache", "2147483647");
  ALMOST_GOOD(
      (strided(&t->k_cache), t->k_cache.batch = t->k_cache.heads = t->k_cache.len = INT32_MAX,
       t->k_cache.strides[1] = t->k_cache.strides[2] = 0),
      "k_cache's size", "2147483647");
  mask.data = p.k, mask.q_len = mask.keys = mask.heads = mask.batch = INT32_MAX;
  options.mask = &mask;
  ALMOST_GOOD(t->call.options = &options, "mask's size", "2147483647");
  memset(&mask, 0, sizeof mask), mask.size = sizeof mask, options.mask = NULL;
  lists.entries = cells, lists.batch = lists.heads = lists.q_len = lists.k = INT32_MAX;
  options.lists = &lists;
  ALMOST_GOOD(t->call.options = &options, "lists' size", "2147483647");
  options.lists = NULL;
  /* Elements that do not lie at multiples of their size. */
  ALMOST_GOOD(t->k_cache.data = (char*)t->k_cache.data + 2, "k_cache begins 2 bytes", "4");
  ALMOST_GOOD((strided(&t->k_cache), t->k_cache.strides[2] = 190), "stride of len is 190", "4");
  ALMOST_GOOD((strided(&t->k_cache), t->k_cache.strides[1] = 98), "stride of heads is 98", "4");
  ALMOST_GOOD((strided(&t->k_cache), t->k_cache.channel_step = 6), "stride of channels is 6", "4");
  ALMOST_GOOD((strided(&t->k_cache), t->k_cache.type = QUOKA_F16, t->k_cache.strides[2] = 97),
              "stride of len is 97", "2");
  ALMOST_GOOD((strided(&t->k_cache), t->k_cache.type = QUOKA_BF16, t->k_cache.strides[2] = 97),
              "stride of len is 97", "2");
  ALMOST_GOOD(t->k_cache.step_bytes = 194, "step_bytes is 194", "4");
  ALMOST_GOOD(t->out.data = (char*)t->out.data + 1, "out begins 1 bytes", "4");
  ALMOST_GOOD(t->call.lse_nat = (float*)((char*)lse + 1), "lse_nat begins 1 bytes", "4");
  ALMOST_GOOD((t->k_cache.type = QUOKA_I8, t->k_cache.scales = (const float*)((char*)sinks + 2)),
              "scales begins 2 bytes", "4");
  ALMOST_GOOD(
      (t->k_cache.cells = (const int32_t*)((const char*)cells + 1), t->k_cache.cells_count = 1),
      "cells begins 1 bytes", "4");
  ALMOST_GOOD(
      (t->k_cache.table = (const int32_t*)((const char*)table + 1), t->k_cache.table_count = 1),
      "table begins 1 bytes", "4");
  options.sinks.data = (const float*)((char*)sinks + 1), options.sinks.count = q_heads;
  ALMOST_GOOD(t->call.options = &options, "sinks begins 1 bytes", "4");
  memset(&options.sinks, 0, sizeof options.sinks);
  mask.data = (const char*)p.k + 2, mask.q_len = 3, mask.keys = 28, options.mask = &mask;
  ALMOST_GOOD(t->call.options = &options, "mask begins 2 bytes", "4");
  mask.data = p.k, mask.strides[2] = 114;
  ALMOST_GOOD(t->call.options = &options, "q_len is 114", "4");
  mask.type = QUOKA_MASK_BF16, mask.strides[2] = 113;
  ALMOST_GOOD(t->call.options = &options, "q_len is 113", "2");
  memset(&mask, 0, sizeof mask), mask.size = sizeof mask, options.mask = NULL;
  memset(&lists, 0, sizeof lists), lists.size = sizeof lists, options.lists = &lists;
  lists.entries = (const int32_t*)((const char*)cells + 2), lists.q_len = 3, lists.k = 1;
  ALMOST_GOOD(t->call.options = &options, "entries begins 2 bytes", "4");
  lists.entries = table, lists.counts = (const int32_t*)((const char*)cells + 2);
  ALMOST_GOOD(t->call.options = &options, "counts begins 2 bytes", "4");
  options.lists = NULL;
  ALMOST_GOOD((t->k_cache.channel_step = 4, t->k_cache.type = QUOKA_Q8_0), "type", "which is 2");
  ALMOST_GOOD(t->k_cache.scales = sinks, "scales", "float");
  ALMOST_GOOD((t->k_cache.table = table, t->k_cache.table_count = 3, t->k_cache.len = 10,
               t->k_cache.batch = 2, t->k_cache.tokens = 25),
              "block table is 7", "which is 2");
  ALMOST_GOOD((t->k_cache.table = table, t->k_cache.table_count = 2, t->k_cache.len = 10,
               t->k_cache.batch = 8, t->k_cache.tokens = 25),
              "is 2", "3");
  ALMOST_GOOD((t->k_cache.table = table, t->k_cache.table_count = -1), "is -1", "0");
  ALMOST_GOOD((t->k_cache.cells = cells, t->k_cache.cells_count = 2), "gathered cell is 25", "25");
  ALMOST_GOOD((t->out.cells = cells, t->out.cells_count = 2), "out is written", "cells");
  ALMOST_GOOD(t->out.dim = 21, "21", "20");
  ALMOST_GOOD(t->out.data = (void*)p.q, "out", "memory");
  ALMOST_GOOD(t->call.past_position = -1, "-1", "0");
  ALMOST_GOOD(t->call.lse_strides[0] = -1, "lse", "");
  ALMOST_GOOD(t->q.size = 0, "q's size is 0", "at least");
  ALMOST_GOOD(t->call.size = 8, "args's size is 8", "at least");
  ALMOST_GOOD((t->call.options = &options, options.size = 0), "attention options's size is 0",
              "at least");
  options.size = sizeof options;
  ALMOST_GOOD((t->call.options = &options, options.arithmetic = 3), "bfloat16_x2",
              "gone: take QUOKA_ARITHMETIC_AUTOMATIC");
  ALMOST_GOOD((t->call.options = &options, options.arithmetic = 4), "bfloat16_x3",
              "gone: take QUOKA_ARITHMETIC_AUTOMATIC");
  ALMOST_GOOD((t->call.options = &options, options.arithmetic = 6), "arithmetic is 6",
              "which is 5");
  options.arithmetic = 0;
  ALMOST_GOOD((t->call.options = &options, options.softcap = -1.0f), "softcap is -1", "1e30");
  options.softcap = 0;
  ALMOST_GOOD((t->call.options = &options, options.scale = NAN), "scale", "nan");
  options.scale = 0;
  ALMOST_GOOD((t->call.options = &options, options.sinks.data = sinks, options.sinks.count = 5),
              "5", "6");
  ALMOST_GOOD((t->call.options = &options, options.sinks.data = NULL, options.sinks.count = 6),
              "sinks's count is 6", "NULL");
  options.sinks.count = 0;
  ALMOST_GOOD((t->call.options = &options, options.sliding_window = -2), "-2", "0");
  options.sliding_window = 0;
  mask.data = p.k, mask.q_len = 3, mask.keys = 27, options.mask = &mask;
  ALMOST_GOOD(t->call.options = &options, "27", "28");
  mask.keys = 28, mask.type = 5;
  ALMOST_GOOD(t->call.options = &options, "type is 5", "which is 4");
  mask.type = 0, mask.keys = -1;
  ALMOST_GOOD(t->call.options = &options, "keys is -1", "0");
#undef ALMOST_GOOD
  CHECK_REFUSED(quoka_alibi_slopes(0, 8.0f, sinks), "q_heads is 0", "1");
  CHECK_REFUSED(quoka_alibi_slopes(4, 8.0f, NULL), "slopes", "NULL");
  CHECK_REFUSED(quoka_alibi_slopes(INT64_MAX, 8.0f, sinks), "9223372036854775807", "2147483647");
  CHECK_REFUSED(quoka_alibi_slopes(4, NAN, sinks), "max_bias is nan", "1e30");
  CHECK_REFUSED(quoka_alibi_slopes(4, INFINITY, sinks), "max_bias is inf", "1e30");
  CHECK_REFUSED(quoka_alibi_slopes(4, -8.0f, sinks), "max_bias is -8", "1e30");
  free((void*)good), free(t);
}

/* Sizes whose products exceed all memory, and options that are not numbers, in the other functions. */
static void sizes_and_options_are_in_range(void) {
  const problem p = make_problem(25, 3);
  const quoka_tensor q = slice(p.q, 0, 3, q_heads, dim), k = slice(p.k, 0, 25, kv_heads, dim);
  const int64_t far[] = {INT64_C(1) << 31, INT64_C(1) << 60, INT64_MAX, INT64_MIN, -1};
  const int64_t counts[] = {0, 0};
  quoka_selection_options how;
  quoka_attention_options options;
  quoka_cache_options of;
  quoka_indexer_options index;
  quoka_select_args select;
  quoka_index_args call;
  quoka_index_lists lists;
  quoka_selection* keep = NULL;
  quoka_state *state = NULL, *none = NULL;
  quoka_cache* cache = NULL;
  quoka_prefill* layer = NULL;
  quoka_indexer *indexer = NULL, *no_indexer = NULL;
  size_t i;
  float scale = 1.0f;
  memset(&how, 0, sizeof how), memset(&options, 0, sizeof options), memset(&of, 0, sizeof of);
  memset(&index, 0, sizeof index), memset(&select, 0, sizeof select), memset(&call, 0, sizeof call);
  memset(&lists, 0, sizeof lists);
  how.size = sizeof how, options.size = sizeof options, of.size = sizeof of,
  index.size = sizeof index, select.size = sizeof select, call.size = sizeof call,
  lists.size = sizeof lists;
  select.q = &q, select.k_cache = &k, select.options = &options;
  call.q = &q, call.k = &k, call.weights = p.q;
  of.kv_heads = kv_heads, of.head_dim = dim;
  CHECK_OK(quoka_selection_create(&keep));
  CHECK_OK(quoka_state_create(NULL, &state));
  CHECK_OK(quoka_cache_create(&of, &cache));
  CHECK_OK(quoka_prefill_create(q_heads, &of, NULL, &how, &layer));
  index.lists_heads = kv_heads;
  CHECK_OK(quoka_indexer_create(&index, &indexer));
  for (i = 0; i < sizeof far / sizeof *far; ++i) {
#define CHECK_SIZE(member, call_of)    \
  do {                                 \
    const int64_t before = member;     \
    member = far[i];                   \
    CHECK((call_of) == QUOKA_INVALID); \
    member = before;                   \
  } while (0)
    CHECK_SIZE(how.keep_first, quoka_state_create(&how, &none));
    CHECK_SIZE(how.keep_last, quoka_state_create(&how, &none));
    CHECK_SIZE(how.queries, quoka_state_create(&how, &none));
    CHECK_SIZE(index.k, quoka_indexer_create(&index, &no_indexer));
    CHECK_SIZE(index.block, quoka_indexer_create(&index, &no_indexer));
    CHECK_SIZE(index.keep_first, quoka_indexer_create(&index, &no_indexer));
    CHECK_SIZE(index.keep_last, quoka_indexer_create(&index, &no_indexer));
    CHECK_SIZE(index.lists_heads, quoka_indexer_create(&index, &no_indexer));
    CHECK_SIZE(of.batch, quoka_prefill_create(q_heads, &of, NULL, &how, &layer));
    CHECK_SIZE(of.kv_heads, quoka_prefill_create(q_heads, &of, NULL, &how, &layer));
    CHECK_SIZE(of.head_dim, quoka_prefill_create(q_heads, &of, NULL, &how, &layer));
    CHECK_SIZE(of.v_dim, quoka_prefill_create(q_heads, &of, NULL, &how, &layer));
    CHECK(quoka_prefill_create(far[i], &of, NULL, &how, &layer) == QUOKA_INVALID);
    CHECK(quoka_state_appended(state, &k, far[i], NULL) == QUOKA_INVALID);
    CHECK(quoka_cache_reserve(cache, far[i]) == QUOKA_INVALID);
    CHECK(quoka_prefill_reserve(layer, far[i]) == QUOKA_INVALID);
    CHECK(quoka_prefill_truncate(layer, far[i]) == QUOKA_INVALID);
    CHECK(quoka_selection_set(keep, far[i], 1, 25, NULL, counts) == QUOKA_INVALID);
    CHECK(quoka_selection_set(keep, 1, far[i], 25, NULL, counts) == QUOKA_INVALID);
    CHECK(quoka_selection_set(keep, 1, 2, far[i], NULL, counts) == QUOKA_INVALID);
    CHECK(quoka_selection_row(keep, far[i], 0, NULL, NULL) == QUOKA_INVALID);
    if (i == 0) continue; /* 2^31 floats lie somewhere */
    call.weights_strides[1] = 3, call.weights_strides[2] = far[i] == -1 ? -far[1] : far[i];
    CHECK_REFUSED(quoka_index_keys(indexer, &call, &lists), "weights's stride of len", "3");
  }
  of.batch = of.kv_heads = of.head_dim = INT32_MAX;
  CHECK_REFUSED(quoka_cache_create(&of, &cache), "size of a token's keys", "2147483647");
  of.batch = 1, of.kv_heads = kv_heads, of.head_dim = dim;
  call.weights = (const float*)((const char*)p.q + 1);
  CHECK_REFUSED(quoka_index_keys(indexer, &call, &lists), "weights begins 1 bytes", "4");
  CHECK_REFUSED(quoka_selection_set(keep, 1, 2, 25, (const int32_t*)((const char*)p.q + 1), counts),
                "positions begins 1 bytes", "4");
  CHECK_REFUSED(
      quoka_selection_set(keep, 1, 1, 25, NULL, (const int64_t*)((const char*)counts + 4)),
      "counts begins 4 bytes", "8");

  select.how = &how;
#define CHECK_NUMBER(member, call_of, message)       \
  do {                                               \
    const float numbers[] = {NAN, INFINITY, -1e31f}; \
    for (i = 0; i < 3; ++i) {                        \
      member = numbers[i];                           \
      CHECK_REFUSED(call_of, message, "");           \
    }                                                \
    member = 0;                                      \
  } while (0)
  for (how.preset = QUOKA_RECOMMENDED; how.preset <= QUOKA_BALANCED; ++how.preset) {
    CHECK_NUMBER(options.scale, quoka_select(&select, keep), "scale");
    CHECK_NUMBER(options.softcap, quoka_select(&select, keep), "softcap");
    CHECK_NUMBER(how.budget_share, quoka_state_create(&how, &none), "(0, 1]");
  }
  how.preset = QUOKA_RECOMMENDED;
  CHECK_NUMBER(options.scale, quoka_prefill_create(q_heads, &of, &options, &how, &layer), "scale");
  CHECK_NUMBER(options.softcap, quoka_prefill_create(q_heads, &of, &options, NULL, &layer),
               "softcap");
  of.k_type = of.v_type = QUOKA_I8;
  of.k_scales.data = &scale, of.k_scales.count = 1;
  CHECK_NUMBER(scale, quoka_cache_create(&of, &cache), "k's scale 0");
#undef CHECK_NUMBER
#undef CHECK_SIZE
  CHECK(none == NULL && no_indexer == NULL);
  quoka_selection_free(keep), quoka_state_free(state), quoka_cache_free(cache);
  quoka_prefill_free(layer), quoka_indexer_free(indexer);
}

/* Structs of a later version are longer, and all members that this version does not have must be 0. */
static void structs_may_grow(void) {
  const problem p = make_problem(10, 2);
  tensors* t = make_call(&p);
  struct {
    quoka_attention_args known;
    int64_t later[2];
  } call;
  memset(&call, 0, sizeof call);
  call.known = t->call;
  call.known.size = sizeof call;
  CHECK_OK(quoka_attention(&call.known));
  CHECK(largest_error(&p, t->result, t->lse) < tolerance);
  call.later[1] = 1;
  CHECK_REFUSED(quoka_attention(&call.known), "are set", "size");
  free(t);
}

int quoka_c_test(void); /* from main.c and c_door_test.cpp */
int quoka_c_test(void) {
  CHECK(strlen(quoka_version()) >= 5 && strlen(quoka_isa()) >= 3);
  attention_is_exact();
  slopes_are_the_papers();
  lists_that_name_no_key_are_refused();
  the_cache_may_hold_the_chunk();
  layouts_give_the_same_bits();
  storage_is_read_and_written();
  executors();
  selections_are_of_the_caller();
  presets_select_within_their_budget();
  masks_hide_keys_from_selection();
  index_heads_choose_keys();
  a_cache_keeps_what_it_is_given();
  a_layer_prefills();
  bad_calls_write_nothing();
  sizes_and_options_are_in_range();
  structs_may_grow();
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures;
}
