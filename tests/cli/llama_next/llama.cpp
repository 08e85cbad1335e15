// See llama.h beside it.
#include "llama.h"

#include <vector>

static const int VOCABULARY = 50;
struct llama_model {};
struct llama_context {
    uint32_t most, capacity;
    llama_pos next = 0;
    std::vector<std::vector<float>> rows;
};
static llama_model model;
static llama_context context;

void ggml_backend_load_all() {}
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type() { return nullptr; }
void llama_log_set(void (*)(ggml_log_level, const char *, void *), void *) {}
void llama_backend_init() {}
llama_model_params llama_model_default_params() { return {nullptr, -1}; }
llama_context_params llama_context_default_params() { return {0, 2048, 512, 4, 4}; }
llama_model * llama_model_load_from_file(const char *, llama_model_params) { return &model; }
llama_context * llama_init_from_model(llama_model *, llama_context_params params) {
    context.most = params.n_batch;
    context.capacity = params.n_ctx;
    return &context;
}
const llama_vocab * llama_model_get_vocab(const llama_model *) { return nullptr; }
int32_t llama_vocab_n_tokens(const llama_vocab *) { return VOCABULARY; }
uint32_t llama_n_batch(const llama_context * c) { return c->most; }
llama_memory_t llama_get_memory(const llama_context * c) { return (llama_memory_t) c; }
void llama_memory_clear(llama_memory_t memory, bool) { ((llama_context *) memory)->next = 0; }
llama_batch llama_batch_init(int32_t tokens, int32_t, int32_t) {
    llama_batch batch{0, new llama_token[tokens], new llama_pos[tokens], new int32_t[tokens],
                      new llama_seq_id *[tokens], new int8_t[tokens]};
    for (int i = 0; i < tokens; ++i) batch.seq_id[i] = new llama_seq_id[1];
    return batch;
}
void llama_batch_free(llama_batch batch) {
    for (int i = 0; i < batch.n_tokens; ++i) delete[] batch.seq_id[i];
    delete[] batch.token;
    delete[] batch.pos;
    delete[] batch.n_seq_id;
    delete[] batch.seq_id;
    delete[] batch.logits;
}
// refuses too many tokens, and positions that do not follow those before
int32_t llama_decode(llama_context * c, llama_batch batch) {
    if ((uint32_t) batch.n_tokens > c->most || (uint32_t) (c->next + batch.n_tokens) > c->capacity) return 1;
    c->rows.assign(batch.n_tokens, {});
    for (int i = 0; i < batch.n_tokens; ++i) {
        if (batch.pos[i] != c->next++ || batch.seq_id[i][0] != 0) return 1;
        if (!batch.logits[i]) continue;
        c->rows[i].assign(VOCABULARY, 0.0f);
        c->rows[i][(batch.token[i] + 1) % VOCABULARY] = 1.0f;
    }
    return 0;
}
void llama_synchronize(llama_context *) {}
float * llama_get_logits_ith(llama_context * c, int32_t i) {
    return c->rows[i < 0 ? c->rows.size() + i : i].data();
}
const char * llama_print_system_info() { return "none"; }
bool llama_supports_gpu_offload() { return false; }
void llama_free(llama_context *) {}
void llama_model_free(llama_model *) {}
