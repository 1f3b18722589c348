/* The constants of a rule, listed once.
 *
 * A formula header lists its constants in a macro CT_<RULE>_COEF(REAL, FLAG). CT_COEF
 * makes the struct in double that the host fills in, CT_ROUNDED the struct in the type
 * of the formula and the function that rounds the former to the latter. */
#ifndef CT_COEF_H
#define CT_COEF_H

#include "math/hd.h"

#define CT_COEF_DOUBLE(name) double name;
#define CT_COEF_REAL(name) ct_real name;
#define CT_COEF_FLAG(name) int name;
#define CT_COEF_ROUND(name) r.name = (ct_real)c->name;
#define CT_COEF_KEEP(name) r.name = c->name;

#define CT_COEF(rule, LIST)                                                            \
    typedef struct rule##_coef {                                                       \
        LIST(CT_COEF_DOUBLE, CT_COEF_FLAG)                                             \
    } rule##_coef;

#define CT_ROUNDED(rule, LIST)                                                         \
    typedef struct CT_REAL(rule##_coef) {                                              \
        LIST(CT_COEF_REAL, CT_COEF_FLAG)                                               \
    } CT_REAL(rule##_coef);                                                            \
    CT_HD static inline CT_REAL(rule##_coef)                                           \
        CT_REAL(rule##_round)(const rule##_coef *c)                                    \
    {                                                                                  \
        CT_REAL(rule##_coef) r;                                                        \
        LIST(CT_COEF_ROUND, CT_COEF_KEEP)                                              \
        return r;                                                                      \
    }

#endif
