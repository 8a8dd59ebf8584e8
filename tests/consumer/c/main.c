#include <quoka/c.h>

#include <stdio.h>

/* Attention over two equal values is that value. */
int main(void) {
  float q[8] = {1, 2, 3, 4, 5, 6, 7, 8}, k[8] = {8, 7, 6, 5, 4, 3, 2, 1}, v[8], out[8];
  const quoka_tensor queries = quoka_token_major(q, QUOKA_F32, 2, 1, 4),
                     keys = quoka_token_major(k, QUOKA_F32, 2, 1, 4);
  const quoka_tensor values = quoka_token_major(v, QUOKA_F32, 2, 1, 4),
                     result = quoka_token_major(out, QUOKA_F32, 2, 1, 4);
  quoka_attention_args call = {0};
  int i;
  for (i = 0; i < 8; ++i) v[i] = 3;
  call.size = sizeof call;
  call.q = &queries, call.chunk_k = &keys, call.chunk_v = &values, call.out = &result;
  if (quoka_attention(&call) != QUOKA_OK) {
    fprintf(stderr, "%s\n", quoka_message());
    return 1;
  }
  for (i = 0; i < 8; ++i)
    if (out[i] < 2.9999f || out[i] > 3.0001f) return 1;
  printf("quoka %s, %s\n", quoka_version(), quoka_isa());
  return 0;
}
