// The arguments of experts.moe and experts.linear in the C ABI; plain C, because goldsmith.h includes it. A tensor
// without dtype is absent.
#pragma once

// PLAIN: row-major in the caller's tensors. The others are in blobs of 16-row panels (experts/packed/layout.py).
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
    int64_t expert_bytes;  // distance between experts
    int64_t panel_bytes;   // packed: distance between panels of 16 rows; plain: distance between rows
    int64_t scales;        // packed: offset inside a panel
    int64_t zeros;         // int4_asym: offset inside a panel
    int64_t group;         // inputs that share a scale; 0 without scales
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
    gs_tensor da, db;  // backward: outputs for their gradients, if requested
    double scale;
} gs_lora;

typedef struct {
    size_t size;
    int32_t threads;
    gs_activation activation;
    int64_t tokens, slots, experts, hidden, intermediate;
    const gs_slice* slices;
    int64_t slice_count;
    double alpha, limit;  // no limit: infinity
    double dropout;
    uint64_t seed;
    const int64_t* numbers;             // of the tokens, for dropout; null: their rows
    int64_t int8;                       // inputs of a row that share a scale in integer products; 0: float products
    gs_tensor x, ids, weights;          // [T, H], [T, k], [T, k]
    gs_tensor gate_up_bias, down_bias;  // [E, 2 I], [E, H]
    gs_lora gate, up, down;
    gs_tensor y;            // forward: [T, H]
    gs_tensor g, u;         // [T k, I] in x's dtype: written by the forward if present, read by the backward
    gs_tensor rows, flags;  // outputs of experts.slots: [T k, H] float32, and [T k] uint8, 1 if a row is not finite
    gs_tensor dy;           // backward: [T, H]
    gs_tensor dx, dweights;
    gs_tensor dgate_up, ddown, dgate_up_bias, ddown_bias;
} gs_moe_args;

// A weight [N, K] of experts.linear, and a bias [N] or none.
typedef struct {
    size_t size;
    gs_matrix weight;
    gs_tensor bias;
} gs_linear_args;

// y = x W^T + bias for contiguous x [rows, K] and y [rows, N] in `dtype`, float32 or bfloat16.
GS_API gs_status gs_linear(const gs_linear_args* args, const void* x, void* y, int64_t rows, gs_dtype dtype,
                           int32_t threads);
GS_API gs_status gs_moe_forward(const gs_moe_args* args);
GS_API gs_status gs_moe_backward(const gs_moe_args* args);

// A lane is a thread that runs one gs_moe_forward at a time while the caller continues. The caller must keep `args` and
// everything they point to until gs_lane_end, which waits for the call and returns its status and message; times[0..1]
// are the begin and end of the call in seconds of CLOCK_MONOTONIC. If word is not NULL, it is set to `value` when the
// call has succeeded or failed, for other waiters such as a GPU. gs_lane_ready announces a call on `threads` threads:
// the lane's thread and the pool's workers then poll for 50 us, because waking them takes as long. gs_lane_free waits,
// too. Lanes do not work in a forked child.
typedef struct gs_lane gs_lane;
GS_API gs_status gs_lane_new(gs_lane** lane);
GS_API gs_status gs_lane_ready(gs_lane* lane, int32_t threads);
GS_API gs_status gs_lane_begin(gs_lane* lane, const gs_moe_args* args, uint32_t* word, uint32_t value);
GS_API gs_status gs_lane_end(gs_lane* lane, double* times);
GS_API void gs_lane_free(gs_lane* lane);

// The panels of one matrix and the row-major codes that they are written from; strides are in bytes from row to row.
typedef struct {
    size_t size;
    const void* codes;
    int64_t rows, code_bytes, code_stride;  // code_bytes: of the codes of a row
    int64_t nibbles;                        // 1: four-bit codes, two in a byte
    const void* scales;                     // null without scales
    int64_t groups, scale_bytes, scale_stride;
    int64_t rows_of_scale;  // 1, or 128 for fp8_block: rows that share a row of scales
    const void* zeros;      // uint8; null without zero points
    int64_t zero_stride;
    void* out;
    int64_t panels, panel_bytes, tiles, scales_at, zeros_at;
} gs_panel_args;

// Runs in the calling thread alone: callers pack experts in several threads.
GS_API gs_status gs_write_panels(const gs_panel_args* args);

// Blocks of a scale and 32 codes. Either `numbers` or `codes` and `scales` are written.
typedef struct {
    size_t size;
    const void* blocks;
    int64_t count, block_bytes;
    int64_t scale_bytes;  // at the beginning of a block: 2 for float16, 1 for E8M0
    int64_t nibbles;      // 1: 16 bytes, first the low nibbles, then the high ones. 0: 32 bytes, int8
    int64_t flip;         // exclusive or of each byte of nibbles
    void* codes;          // nibbles two to a byte, in order, the first one low
    void* scales;
    float* numbers;    // int8, or a nibble less 8, times the scale in float16
    int64_t infinite;  // output, with `scales`: how many are infinite or NaN
} gs_block_args;

// Runs in the calling thread alone.
GS_API gs_status gs_read_blocks(gs_block_args* args);
