/* Whether a wait for other processes is to end early: the host's Ctrl-C.
 *
 * The core knows no host; whoever embeds it may say how to ask. The function is called
 * now and then by threads that wait, which hold no lock, and where it returns true the
 * wait fails with CT_EHOST: the function has noted why. */
#ifndef CT_INTERRUPT_H
#define CT_INTERRUPT_H

#include <stdbool.h>

typedef bool ct_interrupt_fn(void);

/* For the whole process; NULL, the default: nothing interrupts. */
void ct_interrupt_set(ct_interrupt_fn *fn);

bool ct_interrupted(void);

#endif
