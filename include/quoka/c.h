// The library for C99, and for every language that calls C: attention, selection, a cache, a layer.
//
//   quoka_tensor q = quoka_token_major(queries, QUOKA_F32, q_len, 32, 128),
//                k = quoka_token_major(keys, QUOKA_F16, tokens, 8, 128),      // with the chunk
//                v = quoka_token_major(values, QUOKA_F16, tokens, 8, 128),
//                out = quoka_token_major(result, QUOKA_F32, q_len, 32, 128);
//   quoka_attention_args call = {.size = sizeof call, .q = &q, .k_cache = &k, .v_cache = &v,
//                                .cache_holds_chunk = 1, .out = &out};
//   if (quoka_attention(&call) != QUOKA_OK) fprintf(stderr, "%s\n", quoka_message());
//
// That is exact attention. To select, quoka_select() writes which keys of the past a chunk needs,
// and quoka_attention_args.selection takes its result. quoka_prefill_* is a whole layer with a
// cache of its own.
//
// Structs begin with `size`, which the caller sets to sizeof of the struct. Later versions add
// members at the end, and older callers keep working. A member that is 0 or NULL has its default,
// so set what you need and leave out the rest. A struct that is larger than the library's is
// accepted if the members beyond are 0.
//
// Errors. Functions that can fail return a quoka_status; quoka_message() has the reason in this
// header's names, with both numbers. Everything is checked before anything is written: after
// QUOKA_INVALID outputs, caches and handles are as they were. After another failure caches and
// handles are as they were, and outputs may hold anything. No exception leaves the library. A
// pointer to memory that does not exist cannot be detected; with quoka_tensor.bytes the end of a
// buffer is checked. Elements of 2, 4 and 8 bytes must lie at multiples of their size, rows of
// Q8_0, U8, I8 and E4M3 anywhere. Sizes and strides that together lead beyond 57 bits of addresses
// are refused.
//
// Threads. Calls may run at once on any threads, but one handle serves one call at a time. Handles
// that are only read (quoka_selection in attention, quoka_threads) may be shared. Only
// quoka_threads_create() starts threads.
//
// Meanings and guarantees: the C++ headers that comments name, and include/quoka/README.md.
// Results are those of the C++ functions, to the last bit. Link quoka::c or quoka::c_shared
// (CMake), or quoka-c (pkg-config).
#ifndef QUOKA_C_H
#define QUOKA_C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(_WIN32)
#define QUOKA_C_API __attribute__((visibility("default")))
#else
#define QUOKA_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- status -------------------------------------------------------------------------------------

// The result of a call.
typedef enum quoka_status {
  QUOKA_OK = 0,         // done
  QUOKA_INVALID = 1,    // an argument is wrong; nothing was written
  QUOKA_NO_MEMORY = 2,  // an allocation failed
  QUOKA_FAILED = 3      // the caller's executor failed, or anything else
} quoka_status;

// The reason of this thread's last failure: one line, at most 1,023 bytes; "" before the first.
// Valid until this thread's next failure.
QUOKA_C_API const char* quoka_message(void);

// "0.2.0".
QUOKA_C_API const char* quoka_version(void);

// The instructions in use, as "avx512_fma_f16c_vnni". The environment variable QUOKA_ISA selects
// others (runtime/isa.hpp).
QUOKA_C_API const char* quoka_isa(void);

// ---- tensors ------------------------------------------------------------------------------------

// How a row of channels is stored; Formats in include/quoka/README.md has the bytes of each.
typedef enum quoka_type {
  QUOKA_F32 = 0,         // float
  QUOKA_F16 = 1,         // IEEE half
  QUOKA_BF16 = 2,        // bfloat16
  QUOKA_Q8_0 = 3,        // ggml's blocks of 32 channels, 34 bytes each
  QUOKA_U8 = 4,          // by token: float scale, float zero point, codes
  QUOKA_I8 = 5,          // signed codes, a scale for each head, in quoka_tensor.scales
  QUOKA_I8_CHANNEL = 6,  // signed codes, a scale for each channel, in quoka_tensor.scales
  QUOKA_E4M3 = 7         // fp8 (e4m3fn), a scale for each head, in quoka_tensor.scales
} quoka_type;

// Where rows lie in their buffer.
typedef enum quoka_layout {
  QUOKA_STRIDED = 0,      // by quoka_tensor.strides
  QUOKA_TOKEN_MAJOR = 1,  // [batch, capacity, heads, dim]: a token's heads side by side
  QUOKA_HEAD_MAJOR = 2    // [batch, heads, capacity, dim]: a head's tokens side by side
} quoka_layout;

// A tensor [batch, heads, len, dim] in the caller's memory, read or written where it lies.
//
// Pages: with a block table, `table`, the sizes and the layout are those of a pool [pages, heads,
// page_size, dim]: `batch` is pages and `len` is page_size. The tensor is one sequence of `tokens`
// tokens; token i lies in page table[i / page_size], at i % page_size. Gather: with `cells`, row i
// of the tensor is row cells[i] of the tensor that the other members describe, pages included.
typedef struct quoka_tensor {
  size_t size;  // sizeof(quoka_tensor)
  void* data;   // the first byte of the first row; an input is only read
  // Bytes of the buffer from data on, which must hold all rows of a named layout or of strides that
  // are not negative; 0: not checked.
  size_t bytes;
  int32_t type;    // quoka_type
  int32_t layout;  // quoka_layout
  int64_t batch;   // sequences, or pages; 0: 1
  int64_t heads;   // heads of a token
  int64_t len;     // tokens, or tokens of a page
  int64_t dim;     // channels of a row
  // Named layouts: the capacity in tokens, of which the first len are used; 0: len.
  int64_t capacity;
  // Named layouts: bytes from a token to the next (TOKEN_MAJOR) or a row to the next (HEAD_MAJOR),
  // padding included; 0: no padding.
  int64_t step_bytes;
  // STRIDED: the strides of batch, heads and len, in bytes; multiples of an element's bytes, which
  // may be negative.
  int64_t strides[3];
  // Bytes between the channels of a row, for keys and values of F32, F16 and BF16 that lie [dim,
  // token]; 0: side by side.
  int64_t channel_step;
  // For I8, I8_CHANNEL and E4M3; those of head h begin at scales + h * scales_step; NULL: 1.
  const float* scales;
  int64_t scales_step;   // in floats
  const int32_t* table;  // page numbers; NULL: no pages
  int64_t table_count;   // entries of the table
  int64_t tokens;        // of the table's sequence
  const int32_t* cells;  // rows, in any order; NULL: all, as they lie
  int64_t cells_count;   // entries of the list
} quoka_tensor;

// [len, heads, dim], a token's heads side by side.
static inline quoka_tensor quoka_token_major(const void* data, quoka_type type, int64_t len,
                                             int64_t heads, int64_t dim) {
  quoka_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.size = sizeof tensor;
  tensor.data = (void*)(uintptr_t)data;
  tensor.type = (int32_t)type;
  tensor.layout = QUOKA_TOKEN_MAJOR;
  tensor.heads = heads;
  tensor.len = len;
  tensor.dim = dim;
  return tensor;
}

// [heads, len, dim], a head's tokens side by side.
static inline quoka_tensor quoka_head_major(const void* data, quoka_type type, int64_t len,
                                            int64_t heads, int64_t dim) {
  quoka_tensor tensor = quoka_token_major(data, type, len, heads, dim);
  tensor.layout = QUOKA_HEAD_MAJOR;
  return tensor;
}

// An array of the caller's.
typedef struct quoka_floats {
  const float* data;  // NULL: none
  int64_t count;      // how many
} quoka_floats;

// ---- threads ------------------------------------------------------------------------------------

// The threads that run a call's tasks; NULL in its place: the calling thread.
typedef struct quoka_threads quoka_threads;

// A task, which an executor calls with the argument that it was given. It throws no exception.
typedef void (*quoka_task)(void* argument, int64_t task, int32_t worker);

// The caller's own threads.
typedef struct quoka_executor {
  size_t size;      // sizeof(quoka_executor)
  void* context;    // handed to run
  int32_t workers;  // at least 1
  // Calls task(argument, i, worker) for every i in [0, tasks), in any order and on any threads, and
  // returns when all are done: 0, or another number for a failure. No two tasks at once with the
  // same worker of [0, workers).
  int32_t (*run)(void* context, int64_t tasks, quoka_task task, void* argument);
} quoka_executor;

// A thread pool of the library's: `workers` threads, the calling one included.
QUOKA_C_API quoka_status quoka_threads_create(int32_t workers, quoka_threads** threads);
// The caller's own threads. The struct is copied; what it refers to must outlive the handle. An
// executor that fails, leaves out tasks, runs one twice, or passes a task or a worker out of range
// makes the call return QUOKA_FAILED.
QUOKA_C_API quoka_status quoka_threads_of_caller(const quoka_executor* executor,
                                                 quoka_threads** threads);
// Ends the library's threads. NULL does nothing.
QUOKA_C_API void quoka_threads_free(quoka_threads* threads);

// ---- attention ----------------------------------------------------------------------------------

// The number format of a chunk's products (attention/arithmetic.hpp). In brackets: errors, relative
// to the largest output.
typedef enum quoka_arithmetic {
  QUOKA_ARITHMETIC_AUTOMATIC = 0,  // the fastest that rounds no more than the cache's storage does
  QUOKA_ARITHMETIC_FLOAT = 1,      // float [1e-6]
  QUOKA_ARITHMETIC_BF16 = 2,       // one product of bfloat16 [6e-3]; 3 and 4 are gone
  QUOKA_ARITHMETIC_INT8 = 5        // 8-bit integers [2.5e-2]
} quoka_arithmetic;

// The elements of a mask.
typedef enum quoka_mask_type {
  QUOKA_MASK_F32 = 0,  // added after the soft-cap; -infinity, or at or below -60,000, hides the key
  QUOKA_MASK_F16 = 1,  // the same in half
  QUOKA_MASK_BF16 = 2,   // the same in bfloat16
  QUOKA_MASK_BYTES = 3,  // a byte for each key, 0 hides
  QUOKA_MASK_BITS = 4    // bit k % 8 of byte k / 8 for key k, 0 hides
} quoka_mask_type;

// Which keys each query may see, [batch or 1, q_heads or 1, q_len, keys]; columns are the past's
// rows, before any selection, then the chunk's (rows/mask.hpp). It applies in addition to causality
// and the window.
typedef struct quoka_mask {
  size_t size;         // sizeof(quoka_mask)
  const void* data;    // the first byte
  int32_t type;        // quoka_mask_type
  int64_t batch;       // 0 and 1: the same for all sequences
  int64_t heads;       // 0 and 1: the same for all heads
  int64_t q_len;       // queries
  int64_t keys;        // of past and chunk
  int64_t strides[3];  // of batch, heads and q_len, in bytes; all 0: without gaps
  int32_t as_lists;    // 1: read as lists are, faster where the mask shows each query keys of its
                       // own. Results are the same, except for rounding. 0: not
} quoka_mask;

// Sparse attention indices: the keys that each query attends to, as a model's own indexer writes
// them. Numbers of the past's rows, then the chunk's; -1 is not a key (rows/index_lists.hpp). They
// apply in addition to causality, window and mask. Arrays without gaps.
typedef struct quoka_index_lists {
  size_t size;             // sizeof(quoka_index_lists)
  const int32_t* entries;  // [batch, heads, q_len, k]
  const int32_t* counts;   // [batch, heads, q_len], how many entries of a list count; NULL: all
  int64_t batch;           // 0 and 1: the same for all sequences
  int64_t heads;           // KV heads; 0 and 1: the same for all
  int64_t q_len;           // queries
  int64_t k;               // entries of a list
  int64_t block;           // entry e names keys block * e to block * (e + 1) - 1; 0: 1
} quoka_index_lists;

// Options of attention (attention/attention_options.hpp). All 0: plain causal attention.
typedef struct quoka_attention_options {
  size_t size;         // sizeof(quoka_attention_options)
  float scale;         // of the logits; 0: 1 / sqrt(head_dim), so a scale of 0 cannot be set
  float softcap;       // cap on |logit|; 0: none
  quoka_floats sinks;  // [q_heads] a learned logit that joins the softmax sum
  // [q_heads] logit -= slope * distance; quoka_alibi_slopes() has the paper's.
  quoka_floats alibi_slopes;
  const quoka_mask* mask;     // NULL: none
  quoka_floats mask_factors;  // [q_heads] factors of the mask's biases
  int64_t sliding_window;     // a query sees only keys at a distance below this; 0: no window
  int32_t arithmetic;         // quoka_arithmetic
  int32_t bidirectional;  // 0: causal; 1: queries see all of the chunk (`causal = false` in C++)
  int64_t q_offset;       // position of the first query, if has_q_offset
  int32_t has_q_offset;   // 0: the first query follows the past
  const quoka_index_lists* lists;  // NULL: none
} quoka_attention_options;

// Writes ALiBi's slope of each head to slopes [q_heads]: 2^(-max_bias i / n). max_bias is 8 in the
// paper, and may be 0 to 1e30 (attention/attention_options.hpp).
QUOKA_C_API quoka_status quoka_alibi_slopes(int64_t q_heads, float max_bias, float* slopes);

// Scratch memory of attention, kept from call to call; without one each call allocates its own.
typedef struct quoka_workspace quoka_workspace;
// An empty one.
QUOKA_C_API quoka_status quoka_workspace_create(quoka_workspace** workspace);
// NULL does nothing.
QUOKA_C_API void quoka_workspace_free(quoka_workspace* workspace);

// The past keys that each head of each sequence attends to: one list for each KV head, or one for
// each query head. Attention takes both; the number of lists says which it is.
typedef struct quoka_selection quoka_selection;

// A call of attention.
typedef struct quoka_attention_args {
  size_t size;            // sizeof(quoka_attention_args)
  const quoka_tensor* q;  // [batch, q_heads, q_len, head_dim]
  // [batch, kv_heads, kv_len, head_dim], the past, or with cache_holds_chunk past and chunk; NULL:
  // no past.
  const quoka_tensor* k_cache;
  const quoka_tensor* v_cache;  // [batch, kv_heads, kv_len, v_dim]
  // [batch, kv_heads, q_len, head_dim]; NULL: no chunk, or in the cache.
  const quoka_tensor* chunk_k;
  const quoka_tensor* chunk_v;  // [batch, kv_heads, q_len, v_dim]
  const quoka_tensor* out;      // [batch, q_heads, q_len, v_dim]; shares no memory with an input
  // [batch, q_heads, q_len], log-sum-exp: the natural log of the sum of exp(logit), sink included;
  // NULL: not wanted.
  float* lse_nat;
  int64_t lse_strides[3];  // of batch, heads and q_len, in floats; all 0: without gaps
  const quoka_attention_options* options;  // NULL: the defaults
  const quoka_selection* selection;        // of the past; NULL: all of it
  int64_t past_position;                   // position of the past's first key
  // 1: the last q_len rows of k_cache and v_cache are the chunk, and those before it are the past.
  // `selection` is of the past.
  int32_t cache_holds_chunk;
  quoka_workspace* workspace;  // NULL: made for the call
  quoka_threads* threads;      // NULL: the calling thread
} quoka_attention_args;

// softmax(scale * q . k, over the keys that each query sees) * v, exact. Query i of the chunk
// stands at position kv_len + i. It sees the past's keys in `selection` and the chunk's keys 0..i
// (attention/attention.hpp).
QUOKA_C_API quoka_status quoka_attention(const quoka_attention_args* args);

// ---- selection ----------------------------------------------------------------------------------

// An empty selection, of no keys.
QUOKA_C_API quoka_status quoka_selection_create(quoka_selection** selection);
// NULL does nothing.
QUOKA_C_API void quoka_selection_free(quoka_selection* selection);
// Sets lists of the caller's: positions, one list after the other, counts[b * heads + head] in
// each, ascending and below kv_len.
QUOKA_C_API quoka_status quoka_selection_set(quoka_selection* selection, int64_t batch,
                                             int64_t heads, int64_t kv_len,
                                             const int32_t* positions, const int64_t* counts);
// Writes its shape, each number if its pointer is not NULL. is_all: 1 if every key is kept, without
// lists.
QUOKA_C_API quoka_status quoka_selection_shape(const quoka_selection* selection, int64_t* batch,
                                               int64_t* heads, int64_t* kv_len, int32_t* is_all);
// Writes the positions of one head, ascending, and their number. `positions` is valid until the
// selection changes; NULL if every key is kept.
QUOKA_C_API quoka_status quoka_selection_row(const quoka_selection* selection, int64_t b,
                                             int64_t head, const int32_t** positions,
                                             int64_t* count);
// Writes the kept share of attention to past and chunk, the mean over the queries that chose this
// head's keys. 1 if every key is kept, NaN if it was not computed (PAPER, and lists of the
// caller's).
QUOKA_C_API quoka_status quoka_selection_kept_share(const quoka_selection* selection, int64_t b,
                                                    int64_t head, float* share);

// Settings by name: QuokaOptions in select/quoka.hpp, and MassOptions in select/mass_selector.hpp.
typedef enum quoka_preset {
  QUOKA_RECOMMENDED = 0,  // keeps answers
  QUOKA_PAPER = 1,        // the paper's: fastest
  QUOKA_BALANCED = 2      // between them
} quoka_preset;

// How keys are selected. All 0: recommended, with as many keys as the text needs.
typedef struct quoka_selection_options {
  size_t size;        // sizeof(quoka_selection_options)
  int32_t preset;     // quoka_preset
  int32_t no_sketch;  // 1: keys are scored in float only
  // Keys for each head; RECOMMENDED and BALANCED: on average. 0: see budget_share.
  int64_t budget_keys;
  // A share of the past, in (0, 1], at least one key; 0: see budget_keys. Both 0: RECOMMENDED and
  // BALANCED keep the keys that reach their thresholds (MassOptions), PAPER keeps 1,024.
  double budget_share;
  int64_t keep_first;  // attention sinks, inside the budget
  int64_t keep_last;   // most recent keys, inside the budget
  // Queries of a chunk that choose. RECOMMENDED and BALANCED: for each KV head, from all heads of
  // its group; PAPER: from each query head. 0: the preset's.
  int64_t queries;
} quoka_selection_options;

// Optional state of selection for one layer of one sequence. It keeps 8-bit codes of the keys,
// which make selection several times as fast. PAPER selects the same keys with a state and without.
// RECOMMENDED and BALANCED sum shares of attention, which a state computes from its codes: keys of
// nearly equal shares may be exchanged. With no_sketch a state changes nothing.
typedef struct quoka_state quoka_state;
// A state that selects by these options; NULL: the defaults.
QUOKA_C_API quoka_status quoka_state_create(const quoka_selection_options* options,
                                            quoka_state** state);
// NULL does nothing.
QUOKA_C_API void quoka_state_free(quoka_state* state);
// Call this after keys were appended: k [batch, kv_heads, kv_len, head_dim] is the whole cache now.
// If earlier keys have changed, it is refused: call quoka_state_truncate() first. capacity: the
// capacity of the cache in keys; 0: unknown.
QUOKA_C_API quoka_status quoka_state_appended(quoka_state* state, const quoka_tensor* k,
                                              int64_t capacity, quoka_threads* threads);
// Call this after the cache was cut to its first kv_len keys.
QUOKA_C_API quoka_status quoka_state_truncate(quoka_state* state, int64_t kv_len);

// A call of selection.
typedef struct quoka_select_args {
  size_t size;            // sizeof(quoka_select_args)
  const quoka_tensor* q;  // [batch, q_heads, q_len, head_dim], the chunk's queries
  // [batch, kv_heads, kv_len, head_dim], without the chunk, or with cache_holds_chunk past and
  // chunk
  const quoka_tensor* k_cache;
  const quoka_attention_options*
      options;                         // the same as for attention; a mask only for one sequence
  const quoka_selection_options* how;  // without a state; NULL: the defaults
  quoka_state* state;                  // NULL: by `how`, without a state
  quoka_threads* threads;              // NULL: the calling thread
  // [batch, kv_heads, q_len, head_dim], the chunk's own keys, causal and without a mask:
  // RECOMMENDED and BALANCED then weigh a key by its share of all of a query's attention, as
  // quoka_prefill does. NULL: of that to the past.
  const quoka_tensor* chunk_k;
  // 1: the last q_len rows of k_cache are chunk_k, which is NULL then, and those before them are
  // the past.
  int32_t cache_holds_chunk;
} quoka_select_args;

// Writes which keys of the past this chunk attends to. A past no longer than the budget is kept
// whole. Keys that a mask hides from all queries are never chosen; keys that it shows to only some
// are kept in addition (select/visible.hpp). Windows are refused; slopes are refused except by
// PAPER. After a failure `selection` is empty or as it was.
QUOKA_C_API quoka_status quoka_select(const quoka_select_args* args, quoka_selection* selection);

// ---- index heads --------------------------------------------------------------------------------

// An indexer: a model's own index heads choose keys (methods/indexer.hpp). All 0: the 2,048 best
// keys that a query sees, for all KV heads.
typedef struct quoka_indexer_options {
  size_t size;         // sizeof(quoka_indexer_options)
  int64_t k;           // entries of a list at most: keys, or blocks; 0: 2,048
  int64_t block;       // keys of an entry; 0: 1
  int64_t keep_first;  // the first entries that a query sees are always in its list, inside k
  int64_t keep_last;   // and the last ones
  // KV heads that have lists of their own, each by an equal share of the index heads; 0 and 1: one
  // list for all.
  int64_t lists_heads;
  int32_t bidirectional;  // 0: causal; 1: a query sees all that the mask does not hide
} quoka_indexer_options;

// Arguments of an indexer.
typedef struct quoka_index_args {
  size_t size;            // sizeof(quoka_index_args)
  const quoka_tensor* q;  // [batch, index_heads, q_len, dim]
  const quoka_tensor* k;  // [batch, 1 or lists_heads, kv_len, dim], the chunk's q_len keys last
  // [batch, index_heads, q_len]: a score is the sum over heads of weight * max(0, q . k); NULL: the
  // best q . k of all heads.
  const float* weights;
  int64_t weights_strides[3];  // of batch, heads and q_len, in floats; all 0: without gaps
  const quoka_mask*
      mask;  // [.., lists_heads or 1, q_len, kv_len], hidden keys are not listed; NULL: none
  quoka_threads* threads;  // NULL: the calling thread
} quoka_index_args;

// Options, and memory that is kept from call to call.
typedef struct quoka_indexer quoka_indexer;
// NULL: the defaults.
QUOKA_C_API quoka_status quoka_indexer_create(const quoka_indexer_options* options,
                                              quoka_indexer** indexer);
// NULL does nothing.
QUOKA_C_API void quoka_indexer_free(quoka_indexer* indexer);
// Fills in `lists`, whose size must be set, for quoka_attention_options.lists: [batch, lists_heads,
// q_len, k], ascending, with -1 after the last. k is smaller if there are fewer entries. Their
// memory is the indexer's and valid until its next call. After a failure `lists` is as it was.
QUOKA_C_API quoka_status quoka_index_keys(quoka_indexer* indexer, const quoka_index_args* args,
                                          quoka_index_lists* lists);

// ---- a cache ------------------------------------------------------------------------------------

// The format of a cache.
typedef struct quoka_cache_options {
  size_t size;       // sizeof(quoka_cache_options)
  int64_t batch;     // sequences of equal length; 0: 1
  int64_t kv_heads;  // at least 1
  int64_t head_dim;  // channels of a key
  int64_t v_dim;     // of a value; 0: head_dim
  int32_t k_type;    // quoka_type
  int32_t v_type;    // quoka_type
  // I8 and E4M3: [1 or kv_heads]; I8_CHANNEL: [head_dim or kv_heads * head_dim]; none: 1.
  quoka_floats k_scales;
  quoka_floats v_scales;  // the same for values
} quoka_cache_options;

// A cache of one layer's keys and values, for programs that have none (layer/kv_cache.hpp).
typedef struct quoka_cache quoka_cache;
// An empty one.
QUOKA_C_API quoka_status quoka_cache_create(const quoka_cache_options* options,
                                            quoka_cache** cache);
// NULL does nothing.
QUOKA_C_API void quoka_cache_free(quoka_cache* cache);
// Appends k [batch, kv_heads, n, head_dim] and v [batch, kv_heads, n, v_dim], rounded to the
// cache's types.
QUOKA_C_API quoka_status quoka_cache_append(quoka_cache* cache, const quoka_tensor* k,
                                            const quoka_tensor* v, quoka_threads* threads);
// Cuts the cache to its first `len` keys.
QUOKA_C_API quoka_status quoka_cache_truncate(quoka_cache* cache, int64_t len);
// Makes room for `capacity` keys: appending up to there allocates nothing.
QUOKA_C_API quoka_status quoka_cache_reserve(quoka_cache* cache, int64_t capacity);
// Keys in it; -1 for NULL.
QUOKA_C_API int64_t quoka_cache_len(const quoka_cache* cache);
// Writes its keys and values as tensors, valid until the next append; their `size` must be set.
QUOKA_C_API quoka_status quoka_cache_view(const quoka_cache* cache, quoka_tensor* k,
                                          quoka_tensor* v);

// ---- a layer ------------------------------------------------------------------------------------

// One layer with a cache of its own: select, attend, append in one call
// (layer/chunked_prefill.hpp).
typedef struct quoka_prefill quoka_prefill;
// A layer of q_heads query heads. The options are copied; a mask and a q_offset are refused. how:
// NULL attends to all keys.
QUOKA_C_API quoka_status quoka_prefill_create(int64_t q_heads, const quoka_cache_options* cache,
                                              const quoka_attention_options* options,
                                              const quoka_selection_options* how,
                                              quoka_prefill** layer);
// NULL does nothing.
QUOKA_C_API void quoka_prefill_free(quoka_prefill* layer);
// One chunk, or one decode step: q [batch, q_heads, q_len, head_dim], k and v [batch, kv_heads,
// q_len, ...], out [batch, q_heads, q_len, v_dim]. lse_nat [batch, q_heads, q_len] without gaps, or
// NULL.
QUOKA_C_API quoka_status quoka_prefill_forward(quoka_prefill* layer, const quoka_tensor* q,
                                               const quoka_tensor* k, const quoka_tensor* v,
                                               const quoka_tensor* out, float* lse_nat,
                                               quoka_threads* threads);
// Appends keys and values without attention: a saved prefix.
QUOKA_C_API quoka_status quoka_prefill_append(quoka_prefill* layer, const quoka_tensor* k,
                                              const quoka_tensor* v, quoka_threads* threads);
// Cuts the layer's cache to its first `len` tokens.
QUOKA_C_API quoka_status quoka_prefill_truncate(quoka_prefill* layer, int64_t len);
// Makes room for `capacity` tokens.
QUOKA_C_API quoka_status quoka_prefill_reserve(quoka_prefill* layer, int64_t capacity);
// Tokens in its cache; -1 for NULL.
QUOKA_C_API int64_t quoka_prefill_len(const quoka_prefill* layer);
// Writes the past keys that the last forward attended to: all of them if selecting would have taken
// longer.
QUOKA_C_API quoka_status quoka_prefill_selection(const quoka_prefill* layer,
                                                 quoka_selection* selection);

#ifdef __cplusplus
}
#endif

#endif
