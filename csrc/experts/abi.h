// What experts.moe hands over the border; included by goldsmith.h, so plain C. A tensor without dtype is absent.
#pragma once

// "plain": row-major in the caller's own tensors; the others in blobs of 16-row panels (experts/packed/layout.py).
typedef int32_t gs_format;
enum {
    GS_PLAIN_F32 = 1,
    GS_PLAIN_BF16 = 2,
    GS_PACKED_F32 = 3,
    GS_PACKED_BF16 = 4,
    GS_INT8 = 5,
    GS_FP8_BLOCK = 6,
    GS_INT4 = 7,
    GS_INT4_ASYM = 8,
    GS_MXFP4 = 9
};

typedef int32_t gs_activation;
enum { GS_SILU = 1, GS_GELU = 2, GS_GELU_TANH = 3, GS_RELU2 = 4, GS_SWIGLU_OAI = 5 };

// One projection of every expert, [rows, cols]: y = W x with x of `cols` elements.
typedef struct {
    const void* data;
    int64_t rows, cols;
    int64_t expert_bytes;  // from one expert to the next
    int64_t panel_bytes;   // packed: from 16 rows to the next 16; plain: from one row to the next
    int64_t scales;        // packed: offset inside a panel
    int64_t zeros;         // int4_asym: offset inside a panel
    int64_t group;         // inputs that share a scale; 0 when there are none
    gs_format format;
    gs_dtype scale_dtype;
} gs_matrix;

// The intermediate features [begin, end) of every expert.
typedef struct {
    gs_matrix gate, up, down;
    int64_t begin, end;
} gs_slice;

typedef struct {
    gs_tensor a, b;    // [E, r, in], [E, out, r]
    gs_tensor da, db;  // backward: where their gradients go, when they are asked for
    double scale;
} gs_lora;

typedef struct {
    size_t size;
    int32_t threads;
    gs_activation activation;
    int64_t tokens, slots, experts, hidden, intermediate;
    const gs_slice* slices;
    int64_t slice_count;
    double alpha, limit;  // limit: infinite when there is none
    double dropout;
    uint64_t seed;
    int64_t int8;  // inputs of a row that share a scale in products of whole numbers; 0: products of floats
    gs_tensor x, ids, weights;          // [T, H], [T, k], [T, k]
    gs_tensor gate_up_bias, down_bias;  // [E, 2 I], [E, H]
    gs_lora gate, up, down;
    gs_tensor y;     // forward: [T, H]
    gs_tensor g, u;  // [T k, I] in x's dtype: the forward writes them when they are there, the backward reads them
    gs_tensor rows, flags;  // slots instead of y: [T k, H] float32, and [T k] uint8, 1 where a row is not finite
    gs_tensor dy;           // backward: [T, H]
    gs_tensor dx, dweights;
    gs_tensor dgate_up, ddown, dgate_up_bias, ddown_bias;
} gs_moe_args;

GS_API gs_status gs_moe_forward(const gs_moe_args* args);
GS_API gs_status gs_moe_backward(const gs_moe_args* args);

// A thread that makes one call of gs_moe_forward at a time while whoever began it goes on: `args`, and all that they
// point at, stay until gs_lane_end. That waits, and has the call's status and message; times: when the call began and
// ended, in seconds of CLOCK_MONOTONIC. word: becomes `value` when the call is over, whatever came of it, for whoever
// else waits (a GPU does); NULL: nobody. gs_lane_ready says that a call on so many threads comes at once: the lane's
// thread and the pool's look out for it for 50 us, for to be woken takes as long. gs_lane_free waits as well. Not of
// use in a forked child.
typedef struct gs_lane gs_lane;
GS_API gs_status gs_lane_new(gs_lane** lane);
GS_API gs_status gs_lane_ready(gs_lane* lane, int32_t threads);
GS_API gs_status gs_lane_begin(gs_lane* lane, const gs_moe_args* args, uint32_t* word, uint32_t value);
GS_API gs_status gs_lane_end(gs_lane* lane, double* times);
GS_API void gs_lane_free(gs_lane* lane);
