// SwiGLU of the CPU backend against double precision: the exponential over its whole range, silu(gate) · up at gates of
// every size, and values that overflow or are none. Prints one line and exits 1 on the first broken promise.
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "cpu/glu.hpp"

namespace {

void promise(bool kept, const char* what, double at, double found, double wanted) {
    if (kept) return;
    printf("broken: %s at %g: %.9g, not %.9g\n", what, at, found, wanted);
    exit(1);
}

float first(tkt::fvec value) { return value[0]; }

void test_the_exponential() {
    for (double x = -87; x <= 87; x += 0.00731) {
        const double found = first(tkt::exponential(tkt::fvec{} + float(x))), wanted = std::exp(double(float(x)));
        promise(std::fabs(found - wanted) <= 3e-7 * wanted, "exponential", x, found, wanted);
    }
}

void test_every_gate() {
    for (double g = -120; g <= 120; g += 0.0173)
        for (double u : {-3.0, 0.5, 0.0}) {
            const double gate = float(g), wanted = gate / (1 + std::exp(-gate)) * u;
            const double found = first(tkt::silu_times(tkt::fvec{} + float(g), tkt::fvec{} + float(u)));
            promise(std::fabs(found - wanted) <= 1e-6 * std::fabs(wanted) + 1e-35, "silu", g, found, wanted);
        }
}

void test_what_is_no_number() {
    const float inf = INFINITY;
    auto silu = [](float gate, float up) { return first(tkt::silu_times(tkt::fvec{} + gate, tkt::fvec{} + up)); };
    promise(silu(inf, 2.f) == inf, "silu", inf, silu(inf, 2.f), inf);
    promise(std::isnan(silu(NAN, 2.f)), "silu", NAN, silu(NAN, 2.f), NAN);
    promise(std::isnan(silu(1.f, NAN)), "silu of an up that is NaN at", 1, silu(1.f, NAN), NAN);
}

// Column c of a row of packed columns is a gate where c / 8 is even. Gate j is 100 + j, up j is j + 1, so the outputs tell
// which pair each came from.
void test_each_gate_meets_its_up() {
    float packed[tkt::NR];
    tkt::bf16 out[tkt::NR_GLU];
    for (int c = 0; c < tkt::NR; ++c) {
        const int j = c / 16 * 8 + c % 8;
        packed[c] = c / 8 % 2 == 0 ? 100.f + j : j + 1.f;
    }
    tkt::store_swiglu_row(out, packed);
    for (int j = 0; j < tkt::NR_GLU; ++j) {
        uint32_t bits = uint32_t(out[j]) << 16;
        float found;
        memcpy(&found, &bits, sizeof found);
        const double wanted = (100.0 + j) * (j + 1.0);
        promise(std::fabs(found - wanted) <= wanted / 256, "output column", j, found, wanted);
    }
}

}  // namespace

int main() {
    test_the_exponential();
    test_every_gate();
    test_what_is_no_number();
    test_each_gate_meets_its_up();
    puts("kept");
}
