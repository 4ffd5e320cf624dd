// Global layouts: a row-major matrix in device memory with one TMA descriptor for each listed tile type, and
// `pgl`, the array of such views over all ranks (index = rank, so a peer's memory is one more subscript).
#pragma once

#include "st.cuh"

namespace tkt {

// Opaque to us: written by cuTensorMapEncodeTiled on the host, read by the copy engine.
struct alignas(64) tensor_map {
    uint64_t opaque[16];
};

struct coord {
    int row, col;
};

namespace detail {
template <typename Wanted, typename First, typename... Rest>
TKT_DEVICE constexpr int index_of() {
    if constexpr (sizeof...(Rest) == 0) {
        return 0;
    } else {
        return __is_same(Wanted, First) ? 0 : 1 + index_of<Wanted, Rest...>();
    }
}
}  // namespace detail

// A tile type that is not listed cannot be moved by TMA; the box of its descriptor is one panel.
template <typename T, typename... Tiles>
struct gl {
    tensor_map maps[sizeof...(Tiles)];
    T* data;
    int32_t rows, cols;

    template <typename Tile>
    TKT_DEVICE const tensor_map& map() const {
        static_assert((__is_same(Tile, Tiles) || ...), "this tile type is not listed in the global layout");
        return maps[detail::index_of<Tile, Tiles...>()];
    }
};

// Without tiles: a view for ordinary and 1-D bulk accesses.
template <typename T>
struct gl<T> {
    T* data;
    int32_t rows, cols;

    TKT_DEVICE T* at(int row, int col) const { return data + static_cast<int64_t>(row) * cols + col; }
};

// Plain unicast peer access; there is no multicast address on purpose.
template <typename GL, int WORLD>
struct pgl {
    static constexpr int world = WORLD;
    GL views[WORLD];

    TKT_DEVICE const GL& operator[](int rank) const { return views[rank]; }
};

}  // namespace tkt
