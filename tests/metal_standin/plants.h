// plants.h: misuses of Metal, each of which the stand-in must name.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace standin {

const std::map<std::string, std::function<void()>>& plants();

}  // namespace standin
