// Runs a model with llama.cpp. One command a line on stdin, one line of JSON on stdout for each; ends at the end of
// stdin. Compiled against the header of the llama.cpp that it runs, because the structs change between versions.
//
//   llama_runner MODEL THREADS CONTEXT BATCH GPU_LAYERS EXPERTS_ON_CPU
//   logits FILE ID...     writes the logits of every token to FILE, float32 [tokens, vocabulary]
//   prompt - ID...        seconds to compute these tokens
//   decode COUNT ID...    after these tokens, COUNT more, each the most likely one; seconds of each, and the tokens
#include "ggml-backend.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#ifdef __linux__
#include <csignal>
#include <sys/prctl.h>
#endif

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Runner {
    llama_model * model;
    llama_context * context;
    int vocabulary;
    size_t most;  // tokens of a call

    bool decode(const llama_token * ids, size_t count, size_t position, bool all) {
        llama_batch batch = llama_batch_init((int32_t) count, 0, 1);
        for (size_t i = 0; i < count; ++i) {
            batch.token[i] = ids[i];
            batch.pos[i] = (llama_pos) (position + i);
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = all || i + 1 == count;
        }
        batch.n_tokens = (int32_t) count;
        int status = llama_decode(context, batch);
        llama_synchronize(context);
        llama_batch_free(batch);
        return status == 0;
    }

    bool prompt(const std::vector<llama_token> & ids) {
        llama_memory_clear(llama_get_memory(context), true);
        for (size_t at = 0; at < ids.size(); at += most) {
            if (!decode(ids.data() + at, std::min(most, ids.size() - at), at, false)) return false;
        }
        return true;
    }

    llama_token likeliest() {
        const float * logits = llama_get_logits_ith(context, -1);
        return (llama_token) (std::max_element(logits, logits + vocabulary) - logits);
    }

    bool write_logits(const std::string & path, const std::vector<llama_token> & ids) {
        llama_memory_clear(llama_get_memory(context), true);
        FILE * file = fopen(path.c_str(), "wb");
        if (!file) return false;
        bool good = true;
        for (size_t at = 0; good && at < ids.size(); at += most) {
            size_t count = std::min(most, ids.size() - at);
            good = decode(ids.data() + at, count, at, true);
            for (size_t i = 0; good && i < count; ++i) {
                const float * row = llama_get_logits_ith(context, (int32_t) i);
                good = fwrite(row, sizeof(float), vocabulary, file) == (size_t) vocabulary;
            }
        }
        return fclose(file) == 0 && good;
    }
};

static void list(const char * name, const std::vector<std::string> & values) {
    printf("\"%s\": [", name);
    for (size_t i = 0; i < values.size(); ++i) printf("%s%s", i ? ", " : "", values[i].c_str());
    printf("]");
}

static bool answer(Runner & run, const std::string & verb, const std::string & word,
                   const std::vector<llama_token> & ids) {
    if (verb == "logits") {
        if (!run.write_logits(word, ids)) return false;
        printf("{\"vocabulary\": %d}\n", run.vocabulary);
        return true;
    }
    double began = now();
    if (!run.prompt(ids)) return false;
    llama_token next = run.likeliest();
    double first = now() - began;
    if (verb == "prompt") {
        printf("{\"seconds\": %.9f}\n", first);
        return true;
    }
    std::vector<std::string> seconds, tokens{std::to_string(next)};
    for (int i = 0, count = atoi(word.c_str()); i < count; ++i) {
        began = now();
        if (!run.decode(&next, 1, ids.size() + i, false)) return false;
        next = run.likeliest();
        char text[32];
        snprintf(text, sizeof text, "%.9f", now() - began);
        seconds.push_back(text);
        tokens.push_back(std::to_string(next));
    }
    printf("{");
    list("seconds", seconds);
    printf(", ");
    list("ids", tokens);
    printf("}\n");
    return true;
}

int main(int count, char ** words) {
    if (count != 7) return 2;
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // ends with the program that started it
#endif
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
    }, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    llama_model_params model_options = llama_model_default_params();
    model_options.n_gpu_layers = atoi(words[5]);
    llama_model_tensor_buft_override on_cpu[] = {
        {"\\.ffn_(up|down|gate)_exps", ggml_backend_cpu_buffer_type()}, {nullptr, nullptr}};
    if (atoi(words[6])) model_options.tensor_buft_overrides = on_cpu;
    Runner run{};
    run.model = llama_model_load_from_file(words[1], model_options);
    if (!run.model) return 3;
    llama_context_params options = llama_context_default_params();
    options.n_ctx = (uint32_t) atoi(words[3]);
    options.n_batch = options.n_ubatch = (uint32_t) atoi(words[4]);
    options.n_threads = options.n_threads_batch = atoi(words[2]);
    run.context = llama_init_from_model(run.model, options);
    if (!run.context) return 4;
    run.vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(run.model));
    run.most = llama_n_batch(run.context);
    bool alone = atoi(words[5]) && !llama_supports_gpu_offload();
    printf("{\"ready\": true, \"system\": \"%s\", \"note\": \"%s\"}\n", llama_print_system_info(),
           alone ? "built without a backend for GPUs: all of it runs on the CPU" : "");
    fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream parts(line);
        std::string verb, word;
        parts >> verb >> word;
        std::vector<llama_token> ids;
        for (llama_token id; parts >> id;) ids.push_back(id);
        if (!answer(run, verb, word, ids)) printf("{\"error\": \"llama_decode failed\"}\n");
        fflush(stdout);
    }
    llama_free(run.context);
    llama_model_free(run.model);
    return 0;
}
