// See llama.h beside it.
#pragma once
typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type();
void ggml_backend_load_all();
