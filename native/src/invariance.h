// Whether sums are added in an order that is a function of absolute positions alone, in the whole process.
#pragma once

namespace clearhead {

bool is_invariant();

}  // namespace clearhead
