/* A tile of a matrix product. Expanded by cpu/expand.h for F32 and F64.
 *
 * Every element of the product is a single sum over k in rising order, so blocking and
 * vectorising the loops changes no bit. */

/* to[k][row], from rows [row0, row0 + rows) and columns [k0, k0 + depth) of op(X);
 * the rows up to TILE are filled with zeros. */
static void
CT_NAME(pack)(ct_elem *restrict to, const void *data, bool by_column, size_t ld,
              size_t row0, size_t rows, size_t k0, size_t depth)
{
    const ct_elem *restrict x = data;
    const size_t row_step = by_column ? 1 : ld;
    const size_t k_step = by_column ? ld : 1;
    for (size_t k = 0; k < depth; k++) {
        const ct_elem *column = x + row0 * row_step + (k0 + k) * k_step;
        for (size_t r = 0; r < rows; r++) {
            to[k * TILE + r] = column[r * row_step];
        }
        for (size_t r = rows; r < TILE; r++) {
            to[k * TILE + r] = 0;
        }
    }
}

/* sums[r][c] += a[k][r] * b[k][c], four rows at a time so that a row of b is loaded
 * once for four. */
static void
CT_NAME(multiply)(ct_elem *restrict sums, const ct_elem *restrict a,
                  const ct_elem *restrict b, size_t depth)
{
    for (size_t r = 0; r < TILE; r += 4) {
        for (size_t c = 0; c < TILE; c += STRIP) {
            ct_elem s[4][STRIP];
            for (size_t q = 0; q < 4; q++) {
                memcpy(s[q], sums + (r + q) * TILE + c, sizeof s[q]);
            }
            for (size_t k = 0; k < depth; k++) {
                const ct_elem *restrict bk = b + k * TILE + c;
                const ct_elem *restrict ak = a + k * TILE + r;
                for (size_t j = 0; j < STRIP; j++) {
                    s[0][j] += ak[0] * bk[j];
                    s[1][j] += ak[1] * bk[j];
                    s[2][j] += ak[2] * bk[j];
                    s[3][j] += ak[3] * bk[j];
                }
            }
            for (size_t q = 0; q < 4; q++) {
                memcpy(sums + (r + q) * TILE + c, s[q], sizeof s[q]);
            }
        }
    }
}

static void
CT_NAME(gemm)(const ct_gemm *gemm, size_t row0, size_t col0)
{
    const size_t rows = gemm->m - row0 < TILE ? gemm->m - row0 : TILE;
    const size_t cols = gemm->n - col0 < TILE ? gemm->n - col0 : TILE;
    ct_elem sums[TILE * TILE] = {0};
    ct_elem a[DEPTH * TILE];
    ct_elem b[DEPTH * TILE];

    for (size_t k0 = 0; k0 < gemm->k; k0 += DEPTH) {
        const size_t depth = gemm->k - k0 < DEPTH ? gemm->k - k0 : DEPTH;
        CT_NAME(pack)(a, gemm->a, gemm->trans_a, gemm->lda, row0, rows, k0, depth);
        CT_NAME(pack)(b, gemm->b, !gemm->trans_b, gemm->ldb, col0, cols, k0, depth);
        CT_NAME(multiply)(sums, a, b, depth);
    }
    const ct_elem alpha = (ct_elem)gemm->alpha;
    const ct_elem beta = (ct_elem)gemm->beta;
    for (size_t r = 0; r < rows; r++) {
        ct_elem *restrict c = (ct_elem *)gemm->c + (row0 + r) * gemm->ldc + col0;
        for (size_t j = 0; j < cols; j++) {
            const ct_elem product = alpha * sums[r * TILE + j];
            c[j] = beta == 0 ? product : product + beta * c[j];
        }
    }
}
