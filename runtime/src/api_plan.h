// The functions of the C interface (atsc.h) that concern a plan; api.cc has those of sessions.
#pragma once

#include "atsc.h"

namespace atsc {

atsc_status plan_open(const atsc_plan_options* options, atsc_plan** plan, atsc_message* message);
atsc_status plan_close(atsc_plan* plan, atsc_message* message);
atsc_status plan_get_info(const atsc_plan* plan, atsc_plan_info* info, atsc_message* message);
atsc_status plan_profile_unit(atsc_plan* plan, atsc_unit_profile* profile, atsc_message* message);
atsc_status plan_profile_link(atsc_plan* plan, atsc_link_profile* profile, atsc_message* message);
atsc_status plan_script_device(atsc_plan* plan, const char* what, double value,
                               atsc_message* message);
atsc_status plan_get_events(atsc_plan* plan, atsc_event* events, int64_t room, int64_t* count,
                            atsc_message* message);
atsc_status plan_take_change(atsc_plan* plan, atsc_change* change, atsc_message* message);

}  // namespace atsc
