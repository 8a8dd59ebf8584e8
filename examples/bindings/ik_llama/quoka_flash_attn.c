// ik_llama.cpp's GGML_OP_FLASH_ATTN_EXT for prompts, by exact attention over quoka/c.h. Every thread of ggml calls it
// with its number and computes some KV heads, or a part of the queries of one, in calls of its own. ik_llama.patch puts
// it in front of ik_llama.cpp's kernel, which computes the calls that this function leaves: README.md.
#include <ggml.h>
#include <quoka/c.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t type_of(enum ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return QUOKA_F32;
    case GGML_TYPE_F16:
      return QUOKA_F16;
    case GGML_TYPE_BF16:
      return QUOKA_BF16;
    case GGML_TYPE_Q8_0:
      return QUOKA_Q8_0;
    default:
      return -1;  // repacked and other types
  }
}

static char* at(const struct ggml_tensor* t, int64_t i1, int64_t i2, int64_t i3) {
  return (char*)t->data + i1 * (int64_t)t->nb[1] + i2 * (int64_t)t->nb[2] + i3 * (int64_t)t->nb[3];
}

// [heads, len, dim] in steps of bytes.
static quoka_tensor rows(char* data, int32_t type, int64_t heads, int64_t len, int64_t dim,
                         size_t head_step, size_t step) {
  quoka_tensor r = quoka_head_major(data, (quoka_type)type, len, heads, dim);
  r.layout = QUOKA_STRIDED, r.strides[1] = (int64_t)head_step, r.strides[2] = (int64_t)step;
  return r;
}

static pthread_key_t workspaces;  // a thread's own; freed as it ends
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void free_workspace(void* workspace) { quoka_workspace_free(workspace); }
static void make_key(void) {
  if (pthread_key_create(&workspaces, free_workspace) != 0) abort();
}
// That of the calling thread. Without OpenMP ggml starts new threads for each graph.
static quoka_workspace* own_workspace(void) {
  if (pthread_once(&once, make_key) != 0) abort();
  quoka_workspace* workspace = pthread_getspecific(workspaces);
  if (workspace == NULL && (quoka_workspace_create(&workspace) != QUOKA_OK ||
                            pthread_setspecific(workspaces, workspace) != 0))
    abort();
  return workspace;
}

// Returns whether it has computed dst, the same on all threads. It leaves calls of fewer than 16 queries, with ALiBi,
// without a mask or of other types.
int quoka_flash_attn(struct ggml_tensor* dst, int ith, int nth);
int quoka_flash_attn(struct ggml_tensor* dst, int ith, int nth) {
  const struct ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2],
                           *mask = dst->src[3], *sinks = dst->src[4];
  const int64_t queries = q->ne[1], kv_heads = k->ne[2], group = q->ne[2] / kv_heads;
  float parameters[3];  // scale, largest ALiBi bias, soft-cap
  memcpy(parameters, dst->op_params, sizeof parameters);
  if (queries < 16 || q->type != GGML_TYPE_F32 || type_of(k->type) < 0 || type_of(v->type) < 0 ||
      mask == NULL || mask->type != GGML_TYPE_F16 || mask->ne[2] * mask->ne[3] != 1 ||
      parameters[1] != 0.0f || dst->src[5] != NULL || v->ne[2] != kv_heads ||
      k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3])
    return 0;
  quoka_workspace* const workspace = own_workspace();

  // An item is a part of a KV head's queries in one sequence. The number of parts gives all threads as many items.
  const int64_t heads = kv_heads * q->ne[3];
  int64_t parts = 1;
  while (heads * parts % nth != 0 && parts < queries / 8) ++parts;
  for (int64_t item = ith; item < heads * parts; item += nth) {
    const int64_t part = item % parts, head = item / parts % kv_heads,
                  sequence = item / parts / kv_heads;
    const int64_t first = queries * part / parts, count = queries * (part + 1) / parts - first,
                  q_head = head * group;
    const quoka_tensor of_q = rows(at(q, first, q_head, sequence), QUOKA_F32, group, count,
                                   q->ne[0], q->nb[2], q->nb[1]),
                       of_k = rows(at(k, 0, head, sequence), type_of(k->type), 1, k->ne[1],
                                   k->ne[0], k->nb[2], k->nb[1]),
                       of_v = rows(at(v, 0, head, sequence), type_of(v->type), 1, v->ne[1],
                                   v->ne[0], v->nb[2], v->nb[1]),
                       out = rows(at(dst, q_head, first, sequence), QUOKA_F32, group, count,
                                  dst->ne[0], dst->nb[1], dst->nb[2]);
    const quoka_mask visible = {.size = sizeof visible,
                                .data = at(mask, first, 0, 0),
                                .type = QUOKA_MASK_F16,
                                .q_len = count,
                                .keys = k->ne[1],
                                .strides = {0, 0, (int64_t)mask->nb[1]}};
    const quoka_attention_options options = {
        .size = sizeof options,
        .scale = parameters[0],
        .softcap = parameters[2],
        .sinks = {sinks ? (const float*)sinks->data + q_head : NULL, sinks ? group : 0},
        .mask = &visible,
        .bidirectional = 1,
        .has_q_offset = 1,
        .q_offset = k->ne[1]};
    const quoka_attention_args call = {.size = sizeof call,
                                       .q = &of_q,
                                       .k_cache = &of_k,
                                       .v_cache = &of_v,
                                       .out = &out,
                                       .options = &options,
                                       .workspace = workspace};
    if (quoka_attention(&call) != QUOKA_OK) {  // too late for ik_llama.cpp's kernel: other threads have written
      fprintf(stderr, "quoka_flash_attn: %s\n", quoka_message());
      abort();
    }
  }
  return 1;
}
