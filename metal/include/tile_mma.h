// tile_mma.h: the matrix multiply of a threadgroup, and the only file that knows the hardware's units.
//
//   TileAccumulator<T, M, N, S>   sums[M][N] fp32 of S simdgroups, T = half or float operands
//     zero()
//     multiply(a, b, simdgroup)   sums[m][n] += sum over k of a[m][k] * b[n][k];  a [M][32], b [N][32], k contiguous,
//                                 rows EXPERTILE_TILE_STRIDE(T) elements apart
//     multiply(a, columns, simdgroup)   the same where right_in_registers: columns.read4(n, k) are b[n][k .. k+3]
//     combine(other, function)    sums = function.of(sums, other.sums), element by element
//     store(c, simdgroup)         c [M][N] = sums
//
// Every thread of the threadgroup calls each of them, uniformly. The caller puts the barriers. Over k there is one
// order an element, ascending, so that the bits do not depend on M, N or S.
//
// Bodies: mma of CUDA; simdgroup_matrix of every Apple GPU (the base library); and, for half operands where the host
// defines EXPERTILE_METAL_TENSOR to 1, matmul2d of Metal 4. Its weights are staged like the others', or, with
// EXPERTILE_METAL_K4 at 1, decoded straight into registers, four k of a column at a time.
#pragma once
#include <metal_stdlib>

using namespace metal;

#define EXPERTILE_TILE_INNER 32

// One body a unit: a compiler with another one has its #elif here.
#if defined(EXPERTILE_CUDA)

// Operands go from memory to where they are staged in one step.
#define EXPERTILE_TILE_AHEAD false

// Rows of staged operands lie 16 bytes further apart than their length, so that the eight rows that a simdgroup reads
// at once lie in different banks.
#define EXPERTILE_TILE_STRIDE(T) (EXPERTILE_TILE_INNER + 16 / sizeof(T))

// Four 8x8 blocks of halves, a lane's address the row of one block.
METAL_FUNC void load_blocks(const threadgroup half* row, thread uint* to) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(__cvta_generic_to_shared(row))
               : "memory");
}

// sums [16][8] += a [16][16] * b [8][16]
METAL_FUNC void multiply_blocks(thread float* sums, const thread uint* a, uint b0, uint b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma m16n8k16, from compute capability 8.0 on. A simdgroup owns N / S columns, whole; lane l holds of each 16x8 block
// the elements (l/4, 2(l%4)), the one right of it, and the two 8 rows below. The units cut off what they add, so the
// 32 products of a step are added up from zero there and then to the sum in fp32, rounded to nearest.
template <typename T, uint M, uint N, uint S>
struct TileAccumulator {
  static constant constexpr bool right_in_registers = false;
  static constant constexpr uint row_blocks = M / 16, column_blocks = N / (8 * S);
  static_assert(M % 16 == 0 && N % (8 * S) == 0, "a tile is made of 16x8 blocks");

  float sums[row_blocks][column_blocks][4];

  METAL_FUNC void zero() {
    for (uint r = 0; r < row_blocks; ++r) {
      for (uint c = 0; c < column_blocks; ++c) {
        for (uint i = 0; i < 4; ++i) {
          sums[r][c][i] = 0.0f;
        }
      }
    }
  }

  METAL_FUNC void multiply(const threadgroup half* a, const threadgroup half* b, uint simdgroup) {
    const uint lane = simd_lane();
    const uint stride = EXPERTILE_TILE_STRIDE(half);
    uint right[column_blocks][4];
    for (uint c = 0; c < column_blocks; ++c) {
      load_blocks(b + ((simdgroup * column_blocks + c) * 8 + lane % 8) * stride + 8 * (lane / 8), right[c]);
    }
    for (uint r = 0; r < row_blocks; ++r) {
      const threadgroup half* row = a + (r * 16 + lane % 16) * stride + 8 * (lane / 16);
      uint left[2][4];
      load_blocks(row, left[0]);
      load_blocks(row + 16, left[1]);
      for (uint c = 0; c < column_blocks; ++c) {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        multiply_blocks(part, left[0], right[c][0], right[c][1]);
        multiply_blocks(part, left[1], right[c][2], right[c][3]);
        for (uint i = 0; i < 4; ++i) {
          sums[r][c][i] = sums[r][c][i] + part[i];
        }
      }
    }
  }

  // fp32 operands: one chain of fused multiply-adds an element.
  METAL_FUNC void multiply(const threadgroup float* a, const threadgroup float* b, uint simdgroup) {
    const uint lane = simd_lane();
    const uint stride = EXPERTILE_TILE_STRIDE(float);
    for (uint k = 0; k < EXPERTILE_TILE_INNER; k += 4) {
      float4 right[column_blocks][2];
      for (uint c = 0; c < column_blocks; ++c) {
        const threadgroup float* row = b + ((simdgroup * column_blocks + c) * 8 + 2 * (lane % 4)) * stride + k;
        right[c][0] = *reinterpret_cast<const threadgroup float4*>(row);
        right[c][1] = *reinterpret_cast<const threadgroup float4*>(row + stride);
      }
      for (uint r = 0; r < row_blocks; ++r) {
        const threadgroup float* row = a + (r * 16 + lane / 4) * stride + k;
        const float4 upper = *reinterpret_cast<const threadgroup float4*>(row);
        const float4 lower = *reinterpret_cast<const threadgroup float4*>(row + 8 * stride);
        for (uint c = 0; c < column_blocks; ++c) {
          for (uint i = 0; i < 4; ++i) {
            sums[r][c][0] = fma(upper[i], right[c][0][i], sums[r][c][0]);
            sums[r][c][1] = fma(upper[i], right[c][1][i], sums[r][c][1]);
            sums[r][c][2] = fma(lower[i], right[c][0][i], sums[r][c][2]);
            sums[r][c][3] = fma(lower[i], right[c][1][i], sums[r][c][3]);
          }
        }
      }
    }
  }

  template <typename Function>
  METAL_FUNC void combine(thread TileAccumulator& other, thread const Function& function) {
    for (uint r = 0; r < row_blocks; ++r) {
      for (uint c = 0; c < column_blocks; ++c) {
        for (uint i = 0; i < 4; ++i) {
          sums[r][c][i] = function.of(sums[r][c][i], other.sums[r][c][i]);
        }
      }
    }
  }

  METAL_FUNC void store(threadgroup float* c, uint simdgroup) {
    const uint lane = simd_lane();
    for (uint r = 0; r < row_blocks; ++r) {
      for (uint column = 0; column < column_blocks; ++column) {
        threadgroup float* to = c + (r * 16 + lane / 4) * N + (simdgroup * column_blocks + column) * 8 + 2 * (lane % 4);
        to[0] = sums[r][column][0];
        to[1] = sums[r][column][1];
        to[8 * N] = sums[r][column][2];
        to[8 * N + 1] = sums[r][column][3];
      }
    }
  }
};

#elif defined(__METAL_VERSION__)

#include <metal_simdgroup_matrix>

// What the next step needs is loaded while this one multiplies.
#define EXPERTILE_TILE_AHEAD true

#define EXPERTILE_TILE_STRIDE(T) EXPERTILE_TILE_INNER

// simdgroup_matrix 8x8, on every Apple GPU. A simdgroup owns N / S columns, whole.
template <typename T, uint M, uint N, uint S>
struct TileAccumulator {
  static constant constexpr bool right_in_registers = false;
  static constant constexpr uint row_blocks = M / 8, column_blocks = N / (8 * S);
  static_assert(M % 8 == 0 && N % (8 * S) == 0, "a tile is made of 8x8 blocks");

  simdgroup_matrix<float, 8, 8> sums[row_blocks][column_blocks];

  METAL_FUNC void zero() {
    for (uint r = 0; r < row_blocks; ++r) {
      for (uint c = 0; c < column_blocks; ++c) {
        sums[r][c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
  }

  METAL_FUNC void multiply(const threadgroup T* a, const threadgroup T* b, uint simdgroup) {
    const threadgroup T* owned = b + simdgroup * column_blocks * 8 * EXPERTILE_TILE_INNER;
    for (uint k = 0; k < EXPERTILE_TILE_INNER; k += 8) {
      simdgroup_matrix<T, 8, 8> right[column_blocks];
      for (uint c = 0; c < column_blocks; ++c) {
        simdgroup_load(right[c], owned + c * 8 * EXPERTILE_TILE_INNER + k, EXPERTILE_TILE_INNER, ulong2(0, 0), true);
      }
      for (uint r = 0; r < row_blocks; ++r) {
        simdgroup_matrix<T, 8, 8> left;
        simdgroup_load(left, a + r * 8 * EXPERTILE_TILE_INNER + k, EXPERTILE_TILE_INNER);
        for (uint c = 0; c < column_blocks; ++c) {
          simdgroup_multiply_accumulate(sums[r][c], left, right[c], sums[r][c]);
        }
      }
    }
  }

  // Both matrices of a pair lie in the lanes alike.
  template <typename Function>
  METAL_FUNC void combine(thread TileAccumulator& other, thread const Function& function) {
    for (uint r = 0; r < row_blocks; ++r) {
      for (uint c = 0; c < column_blocks; ++c) {
        for (uint i = 0; i < 2; ++i) {
          sums[r][c].thread_elements()[i] =
              function.of(sums[r][c].thread_elements()[i], other.sums[r][c].thread_elements()[i]);
        }
      }
    }
  }

  METAL_FUNC void store(threadgroup float* c, uint simdgroup) {
    for (uint r = 0; r < row_blocks; ++r) {
      for (uint column = 0; column < column_blocks; ++column) {
        simdgroup_store(sums[r][column], c + r * 8 * N + (simdgroup * column_blocks + column) * 8, N);
      }
    }
  }
};

#if EXPERTILE_METAL_TENSOR
#if !__has_include(<MetalPerformancePrimitives/MetalPerformancePrimitives.h>)
#error "tile_mma.h: the tensor library needs MetalPerformancePrimitives"
#endif
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
#include <metal_tensor>

using namespace mpp::tensor_ops;

// A staged operand. Extents go fastest first: k, then the row. The type is spelled out and never taken from a variable,
// whose address space some versions of the header do not accept in it.
typedef tensor<threadgroup half, dextents<int32_t, 2>, tensor_inline> TileOperand;

METAL_FUNC TileOperand tile_operand(threadgroup half* staged, uint rows) {
  return TileOperand(staged, dextents<int32_t, 2>(EXPERTILE_TILE_INNER, int32_t(rows)));
}

// The products of M rows and N columns by S simdgroups, added to what is there: the mode's default would overwrite it.
// Rows of weights with k contiguous are a transposed right operand.
template <uint M, uint N, uint S>
using TileProduct = matmul2d<matmul2d_descriptor(M, N, EXPERTILE_TILE_INNER, false, true, false,
                                                 matmul2d_descriptor::mode::multiply_accumulate),
                             execution_simdgroups<S>>;

#if EXPERTILE_METAL_K4
// Do elements i .. i+3 of this lane hold four neighbouring k of one column?
template <typename Right>
METAL_FUNC bool is_four(thread const Right& right, ushort i) {
  for (ushort j = 0; j < 4; ++j) {
    if (i + j >= right.get_capacity() || !right.is_valid_element(i + j)) {
      return false;
    }
  }
  const auto first = right.get_multidimensional_index(i);
  bool four = first[0] % 4 == 0;
  for (ushort j = 1; j < 4; ++j) {
    const auto at = right.get_multidimensional_index(i + j);
    four = four && at[0] == first[0] + j && at[1] == first[1];
  }
  return four;
}

// The weights of a step, from `column` on, into the lanes. How they lie there is the unit's business: where it is in
// fours of k, one decoding serves four elements, elsewhere each gets its own.
template <typename Columns, typename Right>
METAL_FUNC void fill_right(thread const Columns& columns, uint column, thread Right& right) {
#pragma clang loop unroll(full)
  for (ushort i = 0; i < right.get_capacity(); i += 4) {
    if (is_four(right, i)) {
      const auto at = right.get_multidimensional_index(i);
      const half4 four = columns.read4(column + uint(at[1]), uint(at[0]));
      for (ushort j = 0; j < 4; ++j) {
        right[i + j] = four[j];
      }
      continue;
    }
    for (ushort j = i; j < i + 4; ++j) {
      if (j < right.get_capacity() && right.is_valid_element(j)) {
        const auto at = right.get_multidimensional_index(j);
        right[j] = columns.read4(column + uint(at[1]), uint(at[0]) / 4 * 4)[uint(at[0]) % 4];
      }
    }
  }
}
#endif

// matmul2d. Which elements of the sums a lane has is the unit's business too: they are reached by their indices.
template <uint M, uint N, uint S>
struct TileAccumulator<half, M, N, S> {
#if EXPERTILE_METAL_K4
  // A simdgroup owns N / S columns, whole: operands in registers belong to one simdgroup's product.
  static constant constexpr bool right_in_registers = true;
  static constant constexpr uint owned = N / S;
  typedef TileProduct<M, owned, 1> Product;
  typedef typename Product::template cooperative_tensor_right_input_t<half, half, float, int> Right;
#else
  // The tile is every simdgroup's.
  static constant constexpr bool right_in_registers = false;
  static constant constexpr uint owned = 0;
  typedef TileProduct<M, N, S> Product;
  typedef TileOperand Right;
#endif
  typedef typename Product::template cooperative_tensor_destination_t<TileOperand, Right, float, int> Sums;

  Sums sums;

  METAL_FUNC void zero() {
#pragma clang loop unroll(full)
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
      if (sums.is_valid_element(i)) {
        sums[i] = 0.0f;
      }
    }
  }

#if EXPERTILE_METAL_K4
  template <typename Columns>
  METAL_FUNC void multiply(threadgroup half* a, thread const Columns& columns, uint simdgroup) {
    Product product;
    TileOperand left = tile_operand(a, M);
    Right right = product.template get_right_input_cooperative_tensor<half, half, float>();
    fill_right(columns, simdgroup * owned, right);
    product.run(left, right, sums);
  }
#else
  METAL_FUNC void multiply(threadgroup half* a, threadgroup half* b, uint) {
    Product product;
    TileOperand left = tile_operand(a, M);
    TileOperand right = tile_operand(b, N);
    product.run(left, right, sums);
  }
#endif

  template <typename Function>
  METAL_FUNC void combine(thread TileAccumulator& other, thread const Function& function) {
#pragma clang loop unroll(full)
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
      if (sums.is_valid_element(i)) {
        sums[i] = function.of(sums[i], other.sums[i]);
      }
    }
  }

  METAL_FUNC void store(threadgroup float* c, uint simdgroup) {
#pragma clang loop unroll(full)
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
      if (sums.is_valid_element(i)) {
        const auto at = sums.get_multidimensional_index(i);
        c[uint(at[1]) * N + simdgroup * owned + uint(at[0])] = sums[i];
      }
    }
  }
};
#endif

#else
#error "tile_mma.h: no matrix multiply for this compiler"
#endif
