// The part of llama.cpp's interface that benchmarks/generate/engines/llama_runner.cpp uses, for a model of 50 tokens whose
// likeliest token is always the last one plus 1.
#pragma once
#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>

typedef int32_t llama_token;
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;
struct llama_model;
struct llama_vocab;
struct llama_context;
typedef struct llama_memory_i * llama_memory_t;
enum ggml_log_level { GGML_LOG_LEVEL_INFO = 2, GGML_LOG_LEVEL_ERROR = 4 };
struct llama_model_tensor_buft_override {
    const char * pattern;
    ggml_backend_buffer_type_t buft;
};
struct llama_model_params {
    const llama_model_tensor_buft_override * tensor_buft_overrides;
    int32_t n_gpu_layers;
};
struct llama_context_params {
    uint32_t n_ctx, n_batch, n_ubatch;
    int32_t n_threads, n_threads_batch;
};
struct llama_batch {
    int32_t n_tokens;
    llama_token * token;
    llama_pos * pos;
    int32_t * n_seq_id;
    llama_seq_id ** seq_id;
    int8_t * logits;
};

void llama_log_set(void (*log)(ggml_log_level, const char *, void *), void * data);
void llama_backend_init();
llama_model_params llama_model_default_params();
llama_context_params llama_context_default_params();
llama_model * llama_model_load_from_file(const char * path, llama_model_params params);
llama_context * llama_init_from_model(llama_model * model, llama_context_params params);
const llama_vocab * llama_model_get_vocab(const llama_model * model);
int32_t llama_vocab_n_tokens(const llama_vocab * vocab);
uint32_t llama_n_batch(const llama_context * context);
llama_memory_t llama_get_memory(const llama_context * context);
void llama_memory_clear(llama_memory_t memory, bool data);
llama_batch llama_batch_init(int32_t tokens, int32_t embd, int32_t sequences);
void llama_batch_free(llama_batch batch);
int32_t llama_decode(llama_context * context, llama_batch batch);
void llama_synchronize(llama_context * context);
float * llama_get_logits_ith(llama_context * context, int32_t i);
const char * llama_print_system_info();
bool llama_supports_gpu_offload();
void llama_free(llama_context * context);
void llama_model_free(llama_model * model);
