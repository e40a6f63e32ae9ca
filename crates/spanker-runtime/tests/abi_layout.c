/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints the ABI as a C compiler sees it, one "name value" line each, so that
 * a test can compare it with the Rust mirror. It judges nothing itself.
 */
#include <stddef.h>
#include <stdio.h>

#include "spanker_ioctl.h"

#define NUMBER(name) printf("%s %lu\n", #name, (unsigned long)(name))
#define SIZE(type) printf("sizeof(%s) %lu\n", #type, (unsigned long)sizeof(struct type))
#define ALIGN(type) printf("alignof(%s) %lu\n", #type, (unsigned long)_Alignof(struct type))
#define OFFSET(type, field) \
	printf("offsetof(%s.%s) %lu\n", #type, #field, (unsigned long)offsetof(struct type, field))

int main(void)
{
	NUMBER(SPANKER_IOC_MAGIC);
	NUMBER(SPANKER_ABI_VERSION_MAJOR);
	NUMBER(SPANKER_ABI_VERSION_MINOR);
	NUMBER(SPANKER_ABI_VERSION_PATCH);
	NUMBER(SPANKER_IOC_PING);
	NUMBER(SPANKER_IOC_GET_VERSION);
	SIZE(spanker_version);
	ALIGN(spanker_version);
	OFFSET(spanker_version, major);
	OFFSET(spanker_version, minor);
	OFFSET(spanker_version, patch);
	OFFSET(spanker_version, reserved);
	return 0;
}
