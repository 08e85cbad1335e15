// A step of a decoder model: one new token for each sequence, as one call. Each operation is a region of the pool.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../arena.h"
#include "../error.h"
#include "../pool.h"
#include "../table.h"

namespace gs {
namespace {

constexpr int64_t PART = 512;            // positions of an item of attention; its sums do not depend on the threads
constexpr int64_t ITEM_BYTES = 1 << 16;  // weights of an item of a product, which take about 5 us to read

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

float bfloat16_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits = (bits & 0x7fffffffu) > 0x7f800000u ? (bits | 0x400000u) & 0xffff0000u
                                              : (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
    std::memcpy(&value, &bits, 4);
    return value;
}

bool given(const gs_tensor& t) { return t.dtype != GS_NONE; }

// The outputs of a linear layer, or of its weight alone, for x [rows, stride] into y [rows, outputs].
template <class Linear> struct Outputs {
    const Linear* linear;
    const float* x;
    int64_t stride;
    float* y;
};
using Product = Outputs<gs_linear_args>;
using Layer = Outputs<gs_step_linear>;

int64_t most_experts(const gs_step_args& args) {
    int64_t most = 1;
    for (int64_t i = 0; i < args.layer_count; ++i) most = std::max(most, args.layers[i].router.weight.rows);
    return most;
}

int64_t longest(const gs_step_args& args) {
    int64_t most = 0;
    for (int64_t r = 0; r < args.rows; ++r) most = std::max(most, args.sequences[r].length);
    return most;
}

// Numbers of a row between `down` and `up`, and after `up`, of layers whose LoRA is computed together.
struct LoraWidths {
    int64_t low = 0, out = 0;
    explicit LoraWidths(const gs_step_args& args) {
        for (int64_t i = 0; i < args.layer_count; ++i) {
            const gs_step_layer& l = args.layers[i];
            take({&l.query, &l.key, &l.value}), take({&l.output});
        }
        take({&args.head});
    }
    void take(std::initializer_list<const gs_step_linear*> together) {
        int64_t ranks = 0, outputs = 0;
        for (const gs_step_linear* l : together)
            if (l->down.weight.rows) ranks += l->down.weight.rows, outputs += l->base.weight.rows;
        low = std::max(low, ranks), out = std::max(out, outputs);
    }
};

struct Step {
    gs_step_args& args;
    const StepKernels& kernels = *table().step;
    const int64_t rows = args.rows, H = args.hidden, D = args.head_dim, wide = args.heads * D,
                  narrow = args.kv_heads * D;
    const int64_t group = args.heads / args.kv_heads, parts = longest(args) / PART + 1;
    const bool bf16 = args.dtype == GS_BF16;
    const int64_t experts = most_experts(args);
    float* const stream = static_cast<float*>(args.stream.data);  // h
    const LoraWidths lora{args};
    Arena arena;
    const Region<float> normed = arena.shared<float>(rows * H), queries = arena.shared<float>(rows * wide),
                        mixed = arena.shared<float>(rows * wide), keys = arena.shared<float>(rows * narrow),
                        values = arena.shared<float>(rows * narrow), partial = arena.shared<float>(rows * wide * parts),
                        ends = arena.shared<float>(rows * args.heads * parts * 2),
                        weights = arena.each<float>(PART + 16), routing = arena.shared<float>(rows * experts),
                        logits = arena.shared<float>(rows * vocabulary()), low = arena.shared<float>(rows * lora.low),
                        delta = arena.shared<float>(rows * lora.out);

    // Scratch of the head is only needed by its phase.
    int64_t vocabulary() const { return args.last > 2 * args.layer_count ? args.vocabulary : 0; }

    void run() {
        arena.allocate();
        if (args.first == 0)
            for (int64_t r = 0; r < rows; ++r)
                kernels.read_row(args.embedding, args.sequences[r].token * H, H, stream + r * H);
        for (int64_t phase = args.first; phase < args.last; ++phase) {
            if (phase == 2 * args.layer_count)
                head();
            else if (phase % 2 == 0)
                attention_and_router(phase / 2);
            else
                add_experts(args.layers[phase / 2]);
        }
        arena.check();
    }

    void attention_and_router(int64_t index) {
        gs_step_layer& layer = args.layers[index];
        void *const *to_keys = args.caches + 2 * index * rows, *const *to_values = to_keys + rows;
        double begin = now();
        norms(layer.input_norm);
        layers({{&layer.query, normed.data(), H, queries.data()},
                {&layer.key, normed.data(), H, keys.data()},
                {&layer.value, normed.data(), H, values.data()}});
        place_heads(layer, to_keys, to_values);
        attention(to_keys, to_values);
        layers({{&layer.output, mixed.data(), wide, normed.data()}});
        kernels.add(stream, normed.data(), rows * H, bf16);
        args.seconds[0] += now() - begin, begin = now();
        norms(layer.experts_norm);
        products({{&layer.router, normed.data(), H, routing.data()}}, bf16);
        route(layer, normed.data(), routing.data());
        args.seconds[1] += now() - begin;
    }

    void add_experts(gs_step_layer& layer) {
        const double begin = now();
        if (!args.outside) {
            const gs_status status = gs_moe_merged(layer.experts, &layer.finite);
            if (status != GS_OK) fail(status, "%s", gs_message());
            count(layer);
        }
        for (int64_t r = 0; r < rows; ++r) kernels.read_row(layer.experts->y, r * H, H, normed.data() + r * H);
        kernels.add(stream, normed.data(), rows * H, bf16);
        if (!args.outside) layer.seconds += now() - begin;
        args.seconds[2] += now() - begin;
    }

    void head() {
        const double begin = now();
        norms(args.final_norm);
        layers({{&args.head, normed.data(), H, logits.data()}});
        for (int64_t r = 0; r < rows; ++r)
            kernels.write_row(args.logits, r * args.vocabulary, args.vocabulary, logits.data() + r * args.vocabulary);
        args.seconds[3] += now() - begin;
    }

    void norms(const gs_tensor& weight) const {
        for (int64_t r = 0; r < rows; ++r)
            kernels.norm(stream + r * H, weight, H, float(args.epsilon), normed.data() + r * H, bf16);
    }

    // Several linear layers; the LoRA of all is two regions more.
    void layers(std::initializer_list<Layer> all) const {
        static thread_local std::vector<Product> bases, downs, ups;
        bases.clear(), downs.clear(), ups.clear();
        float *to_low = low.data(), *to_delta = delta.data();
        for (const Layer& l : all) {
            bases.push_back({&l.linear->base, l.x, l.stride, l.y});
            const int64_t rank = l.linear->down.weight.rows;
            if (!rank) continue;
            downs.push_back({&l.linear->down, l.x, l.stride, to_low});
            ups.push_back({&l.linear->up, to_low, rank, to_delta});
            to_low += rows * rank, to_delta += rows * l.linear->base.weight.rows;
        }
        products(bases, bf16);
        if (downs.empty()) return;
        products(downs, false);
        products(ups, false);
        const float* from = delta.data();
        for (const Layer& l : all) {
            if (!l.linear->down.weight.rows) continue;
            const int64_t count = rows * l.linear->base.weight.rows;
            kernels.add(l.y, from, count, bf16);
            from += count;
        }
    }

    // Several products as one region; an item is some outputs of one of them.
    void products(const std::vector<Product>& all, bool to_bf16) const {
        struct Range {
            const Product* product;
            int64_t begin, end;
        };
        static thread_local std::vector<Range> ranges;
        std::vector<Range>& list = ranges;
        list.clear();
        for (const Product& p : all) {
            if (p.linear->weight.format > GS_PLAIN_BF16) {
                packed_product(p, to_bf16);
                continue;
            }
            const gs_matrix& m = p.linear->weight;
            const int64_t bytes = m.cols * (m.format == GS_PLAIN_BF16 ? 2 : 4);
            const int64_t each = std::max<int64_t>(4, ITEM_BYTES / std::max<int64_t>(bytes, 1) / 4 * 4);
            for (int64_t i = 0; i < m.rows; i += each) list.push_back({&p, i, std::min(m.rows, i + each)});
        }
        parallel_for(int64_t(list.size()), [&](int64_t item, int) {
            const Range& range = list[size_t(item)];
            const Product& p = *range.product;
            kernels.linear(*p.linear, range.begin, range.end, p.x, rows, p.stride, p.y, p.linear->weight.rows, to_bf16);
        });
    }

    void packed_product(const Product& p, bool to_bf16) const {
        const gs_status status = gs_linear(p.linear, p.x, p.y, rows, GS_F32, args.threads);
        if (status != GS_OK) fail(status, "%s", gs_message());
        if (!to_bf16) return;
        const int64_t count = rows * p.linear->weight.rows;
        for (int64_t i = 0; i < count; ++i) p.y[i] = bfloat16_of(p.y[i]);
    }

    // Norms and rotates queries and keys, and writes keys and values into the caches.
    void place_heads(const gs_step_layer& layer, void* const* to_keys, void* const* to_values) const {
        std::vector<float> scratch(size_t(3 * D));
        for (int64_t r = 0; r < rows; ++r) {
            const gs_step_row& row = args.sequences[r];
            float *q = queries.data() + r * wide, *k = keys.data() + r * narrow;
            normalise(layer.query_norm, q, args.heads);
            normalise(layer.key_norm, k, args.kv_heads);
            const int64_t angle = row.length * D;
            float *cosines = scratch.data() + D, *sines = scratch.data() + 2 * D;
            kernels.read_row(args.cosines, angle, D, cosines);
            kernels.read_row(args.sines, angle, D, sines);
            for (int64_t h = 0; h < args.heads; ++h) rotate(q + h * D, cosines, sines, scratch.data());
            for (int64_t h = 0; h < args.kv_heads; ++h) {
                rotate(k + h * D, cosines, sines, scratch.data());
                const int64_t at = h * row.head_stride + row.length * D;
                kernels.write_row(cache(to_keys[r]), at, D, k + h * D);
                kernels.write_row(cache(to_values[r]), at, D, values.data() + r * narrow + h * D);
            }
        }
    }

    gs_tensor cache(void* data) const { return {data, args.dtype, 1, {}, {}}; }

    void normalise(const gs_tensor& weight, float* x, int64_t heads) const {
        if (!given(weight)) return;
        const int64_t width = weight.sizes[0];
        for (int64_t i = 0; i < heads * D; i += width)
            kernels.norm(x + i, weight, width, float(args.epsilon), x + i, bf16);
    }

    float rounded(float value) const { return bf16 ? bfloat16_of(value) : value; }

    // x = x cos + rotate_half(x) sin; each product and the sum are rounded
    void rotate(float* x, const float* cosines, const float* sines, float* before) const {
        std::memcpy(before, x, size_t(D) * 4);
        for (int64_t i = 0; i < D; ++i) {
            const float other = i < D / 2 ? -before[i + D / 2] : before[i - D / 2];
            x[i] = rounded(rounded(before[i] * cosines[i]) + rounded(other * sines[i]));
        }
    }

    // A sequence's parts begin at its first position, so that its sums are the same beside any other sequence.
    void attention(void* const* from_keys, void* const* from_values) const {
        parallel_for(rows * args.kv_heads * parts, [&](int64_t item, int worker) {
            const int64_t part = item % parts, head = item / parts % args.kv_heads, r = item / parts / args.kv_heads;
            const gs_step_row& row = args.sequences[r];
            const int64_t begin = part * PART, end = std::min(begin + PART, row.length + 1);
            const int64_t at = (r * args.kv_heads + head) * group, to = at * parts + part * group;
            if (begin >= end) {
                for (int64_t i = 0; i < group; ++i)
                    ends.data()[2 * (to + i)] = -std::numeric_limits<float>::infinity(),
                                          ends.data()[2 * (to + i) + 1] = 0;
                return;
            }
            kernels.attend(queries.data() + at * D, group, from_keys[r], from_values[r],
                           head * row.head_stride + begin * D, end - begin, D, float(args.scaling),
                           weights.data(worker), partial.data() + to * D, ends.data() + 2 * to, bf16);
        });
        for (int64_t head = 0; head < rows * args.heads; ++head) join(head, mixed.data() + head * D);
    }

    // The parts of one head: their sums relative to the largest score of all.
    void join(int64_t head, float* to) const {
        const float *ends = this->ends.data(), *partial = this->partial.data();
        const int64_t first = head / group * group * parts + head % group;
        float most = -std::numeric_limits<float>::infinity(), total = 0;
        for (int64_t p = 0; p < parts; ++p) {
            const float here = ends[2 * (first + p * group)];
            most = here > most || std::isnan(here) ? here : most;
        }
        std::memset(to, 0, size_t(D) * 4);
        for (int64_t p = 0; p < parts; ++p) {
            const int64_t at = first + p * group;
            if (ends[2 * at + 1] == 0) continue;  // after the sequence's end
            const float scale = std::exp(ends[2 * at] - most);
            total += scale * ends[2 * at + 1];
            for (int64_t i = 0; i < D; ++i) to[i] += scale * partial[at * D + i];
        }
        for (int64_t i = 0; i < D; ++i) to[i] = rounded(to[i] / total);
    }

    // ids and weights of the k most probable experts, in falling order. NaN counts as most probable, as in torch.topk.
    void route(gs_step_layer& layer, const float* x, float* scores) const {
        const gs_moe_args& to = *layer.experts;
        const int64_t E = layer.router.weight.rows, k = to.slots;
        auto* ids = static_cast<int64_t*>(to.ids.data);
        auto* weights = static_cast<float*>(to.weights.data);
        for (int64_t r = 0; r < rows; ++r, scores += E, ids += k, weights += k) {
            float most = scores[0], total = 0, chosen = 0;
            for (int64_t e = 1; e < E; ++e) most = std::max(most, scores[e]);
            for (int64_t e = 0; e < E; ++e) total += scores[e] = std::exp(scores[e] - most);
            for (int64_t e = 0; e < E; ++e) scores[e] /= total;
            for (int64_t j = 0; j < k; ++j) {
                int64_t best = -1;
                for (int64_t e = 0; e < E; ++e) {
                    if (std::find(ids, ids + j, e) != ids + j) continue;
                    if (best < 0 || scores[e] > scores[best] || (std::isnan(scores[e]) && !std::isnan(scores[best])))
                        best = e;
                }
                ids[j] = best, weights[j] = scores[best], chosen += scores[best];
            }
            for (int64_t j = 0; j < k; ++j) {
                if (args.normalised) weights[j] /= chosen;
                if (!args.float_weights) weights[j] = rounded(weights[j]);
            }
        }
        for (int64_t r = 0; r < rows; ++r) kernels.write_row(to.x, r * H, H, x + r * H);
    }

    void count(gs_step_layer& layer) const {
        const auto* ids = static_cast<const int64_t*>(layer.experts->ids.data);
        const int64_t routes = rows * layer.experts->slots;
        for (int64_t i = 0; i < routes; ++i) {
            if (std::find(ids, ids + i, ids[i]) != ids + i) continue;
            ++layer.uses[ids[i]];
            ++layer.distinct;
        }
    }
};

void check(const gs_step_args& args) {
    if (args.size != sizeof(gs_step_args))
        fail(GS_INTERNAL, "gs_step_args has %zu bytes, expected %zu: library and Python code are of different versions",
             args.size, sizeof(gs_step_args));
    const int64_t sizes[] = {args.rows,     args.hidden,     args.heads,      args.kv_heads,
                             args.head_dim, args.vocabulary, args.layer_count};
    for (const int64_t size : sizes)
        if (size < 1) fail(GS_INVALID, "a size of a step is %lld, expected 1 or more", static_cast<long long>(size));
    if (args.first < 0 || args.last > 2 * args.layer_count + 1 || args.first > args.last)
        fail(GS_INVALID, "phases %lld to %lld of a step with %lld", static_cast<long long>(args.first),
             static_cast<long long>(args.last), static_cast<long long>(2 * args.layer_count + 1));
    if (args.heads % args.kv_heads || args.head_dim % 16)
        fail(GS_INVALID, "%lld heads of %lld numbers for %lld heads of keys: expected a multiple, and of 16 numbers",
             static_cast<long long>(args.heads), static_cast<long long>(args.head_dim),
             static_cast<long long>(args.kv_heads));
    for (int64_t r = 0; r < args.rows; ++r) {
        const gs_step_row& row = args.sequences[r];
        if (row.token < 0 || row.token >= args.embedding.sizes[0])
            fail(GS_INVALID, "row %lld has token %lld, expected tokens below %lld", static_cast<long long>(r),
                 static_cast<long long>(row.token), static_cast<long long>(args.embedding.sizes[0]));
        if (row.length < 0 || row.length >= row.room || row.length >= args.cosines.sizes[0])
            fail(GS_INVALID, "the cache of row %lld is full: it has %lld positions of %lld", static_cast<long long>(r),
                 static_cast<long long>(row.length), static_cast<long long>(row.room));
    }
}

}  // namespace
}  // namespace gs

gs_status gs_step(gs_step_args* args) {
    return gs::guarded([&] {
        gs::check(*args);
        const gs::Threads threads(args->threads);
        gs::Step(*args).run();
    });
}
