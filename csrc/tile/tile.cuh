// The whole tile layer in one include, in ThunderKittens' vocabulary. Nothing here knows of GEMMs or of peers'
// protocols. The lean includes decide how long a variant takes to build.
#pragma once

#include "base.cuh"
#include "cp_async.cuh"
#include "gl.cuh"
#include "group.cuh"
#include "mma.cuh"
#include "rt.cuh"
#include "semaphore.cuh"
#include "spin.cuh"
#include "st.cuh"
#include "sync.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
