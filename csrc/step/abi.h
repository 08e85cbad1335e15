// The arguments of a decoder model's step in the C ABI; plain C, because goldsmith.h includes it. A tensor without
// dtype is absent. The weights of linear layers are packed, or plain in rows.
#pragma once

// y = weight x + bias, rounded to the model's dtype; with LoRA then y += up (down x), rounded again. down [r, in] and
// up [out, r] are float32 in rows; a `down` without rows is absent.
typedef struct {
    gs_linear_args base, down, up;
} gs_step_linear;

// A sequence of a step: `length` positions of the `room` in its cache are used, and the step writes the next one.
typedef struct {
    int64_t token, length, room;
    int64_t head_stride;  // numbers between two heads in its cache
} gs_step_row;

// A decoder layer: h += output(attention(norm(h))), then h += experts(norm(h)).
typedef struct {
    gs_tensor input_norm, experts_norm;  // [H]
    gs_tensor query_norm, key_norm;      // [D] of each head, or [heads D] of all heads together
    gs_step_linear query, key, value, output;
    gs_linear_args router;       // [E, H]
    const gs_moe_args* experts;  // with x, ids, weights, rows, flags and y
    int64_t* uses;               // [E]: steps that used each expert, counted up
    int64_t distinct;            // experts used, counted up
    double seconds;              // of the experts, counted up
    int32_t finite;              // result: whether no row of the experts, and no sum, has NaN or Inf
    int32_t unused;
} gs_step_layer;

// One new token for each of `rows` sequences, whose caches are separate: a row's numbers depend on no other row.
//
// A step has 2 layer_count + 1 phases: for layer i, attention and router are phase 2 i, and its experts phase 2 i + 1;
// the last one is the head. A call runs phases [first, last), so that a caller can compute experts between two calls;
// then phase 2 i + 1 only adds their y (`outside`).
typedef struct {
    size_t size;
    int32_t threads;
    gs_dtype dtype;  // of the model: every layer's result is rounded to it
    int64_t rows, hidden, heads, kv_heads, head_dim, vocabulary;
    int64_t first, last, outside;
    int64_t normalised, float_weights;  // routing weights: divided by their sum; not rounded to dtype
    double epsilon, scaling;            // of the norms; of the attention's scores
    gs_step_layer* layers;
    int64_t layer_count;
    const gs_step_row* sequences;     // [rows]
    void* const* caches;              // [layers, 2, rows]: keys, values [kv_heads, positions, D] in dtype
    gs_tensor embedding, final_norm;  // [vocabulary, H], [H]
    gs_tensor cosines, sines;         // [positions, D]
    gs_step_linear head;
    gs_tensor stream;   // [rows, H] float32: h between two calls
    gs_tensor logits;   // result: [rows, vocabulary] in dtype
    double seconds[4];  // attention with its products, router, experts, head; counted up
} gs_step_args;

GS_API gs_status gs_step(gs_step_args* args);

// gs_moe_forward with `rows` and `flags`, then y[t] = sum over j of weights[t, j] rows[t k + j], in this order, each
// product and each sum rounded to float32, and once to y's dtype. finite: 1 if no row and no sum has NaN or Inf.
GS_API gs_status gs_moe_merged(const gs_moe_args* args, int32_t* finite);

// A layer's experts in a step that runs on a device, which computes those that it holds.
typedef struct {
    const gs_moe_args* experts;  // with x, ids, rows and flags, which all layers share
    const int32_t* slots;        // [E]: the device's slot of each expert, -1 if the CPU computes it
    int64_t* uses;               // [E]: routes of each expert, counted up
    int64_t computed;            // routes that the CPU computed, counted up
    double seconds;              // of the CPU's experts, counted up
} gs_served_layer;

// The device sets `asked` once x and `routed` of a layer are in host memory; the CPU sets it to 0, computes its rows,
// and sets `answered`, which the device sets to 0 again.
typedef struct {
    size_t size;
    gs_served_layer* layers;
    int64_t layer_count, routes;
    const int64_t* routed;   // [routes]: the experts that the device's router chose
    int64_t* ids;            // [routes]: the ids of `experts`
    const int32_t* threads;  // [routes + 1]: threads for so many routes
    uint32_t *asked, *answered;
    double patience;  // seconds to wait for a question
    int64_t polite;   // whether to yield the processor while waiting
    int64_t served;   // calls that have ended, counted up
} gs_serve_args;

GS_API gs_status gs_serve(gs_serve_args* args);
